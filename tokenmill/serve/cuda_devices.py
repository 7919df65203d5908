"""Finds the CUDA devices of this machine without importing torch, which takes seconds and memory.

A device is a value of CUDA_VISIBLE_DEVICES that makes a process see it alone.
"""

import re
import subprocess
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_SECONDS = 30.0
_PROC = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)]+)\)")
_CUDA_BUILD = re.compile(r"^cuda\b[^=\n]*=\s*['\"]", re.MULTILINE)


def find_cuda_devices(
    environ: Mapping[str, str], listing: Callable[[], str | None] | None = None, proc: Path = _PROC
) -> tuple[str, ...]:
    """The devices that a process with `environ` can use; none if torch is not a CUDA build.

    `listing` returns the output of `nvidia-smi -L`, or None if it fails; then `proc` is counted instead.
    """
    if not torch_has_cuda():
        return ()
    text = (listing or _nvidia_smi)()
    if text is not None:
        devices = _listed(text)
    else:
        devices = tuple(str(number) for number, _ in enumerate(proc.iterdir())) if proc.is_dir() else ()
    return _visible(devices, environ.get(VISIBLE_DEVICES))


def torch_has_cuda() -> bool:
    """Whether torch is a CUDA build, according to its file `version.py`."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        return bool(_CUDA_BUILD.search((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")))
    except OSError:
        return False


def _nvidia_smi() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607 - where the driver's package has put it
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _listed(text: str) -> tuple[str, ...]:
    """UUIDs, as CUDA numbers devices in another order than the listing.

    A GPU that is divided into MIG instances is listed as its instances: a process can use only one of them.
    """
    devices: list[str] = []
    for line in text.splitlines():
        found = _UUID.search(line)
        if found is None:
            continue
        if found[1].startswith("MIG-") and devices and devices[-1].startswith("GPU-"):
            devices.pop()
        devices.append(found[1])
    return tuple(devices)


def _visible(devices: tuple[str, ...], limit: str | None) -> tuple[str, ...]:
    """The devices that the variable allows. Like CUDA, ignores everything after an invalid entry."""
    if limit is None:
        return devices
    visible: list[str] = []
    for word in (word.strip() for word in limit.split(",")):
        is_known = int(word) < len(devices) if word.isdecimal() else word.startswith(("GPU-", "MIG-"))
        if not (is_known and devices) or word in visible:
            break
        visible.append(word)
    return tuple(visible)
