"""Finds the device that computes. torch is asked in a process of its own: here it is never imported."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.doctor.finding import Finding, fail, human_bytes, ok, warn

_TIMEOUT_SECONDS = 120.0
_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({
    "torch": torch.__version__,
    "built_for_cuda": torch.version.cuda,
    "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "devices": [{"name": one.name, "bytes": one.total_memory} for one in devices],
    "free": [torch.cuda.mem_get_info(i)[0] for i in range(len(devices))],
}))
"""


@dataclass(frozen=True, slots=True)
class Device:
    """What the service computes on. `free_bytes`: of its memory; None: unknown. `is_cuda`: a CUDA device."""

    findings: list[Finding]
    free_bytes: int | None
    is_cuda: bool = False


def check_device(wanted: str, environ: Mapping[str, str], has_nvidia: bool | None = None) -> Device:
    """`wanted`: the setting `device`. `has_nvidia`: whether the machine has NVIDIA's driver."""
    probe = probe_torch(environ)
    if isinstance(probe, str):
        remedy = "install the packages of the worker: pip install 'tokenmill[serve]'"
        return Device([fail("device", f"torch cannot be used: {probe}", remedy)], None)
    has_nvidia = Path("/proc/driver/nvidia").is_dir() if has_nvidia is None else has_nvidia
    if wanted != "cpu" and probe["devices"]:
        return _cuda(probe)
    free = available_bytes()
    return Device([_cpu(probe, wanted, has_nvidia)], free)


def probe_torch(environ: Mapping[str, str]) -> Any:
    """What torch says about the machine, or the reason why it says nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS, env=dict(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        return str(error.strerror)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _cuda(probe: Mapping[str, Any]) -> Device:
    findings = [
        ok("device", f"{one['name']}, {human_bytes(free)} of {human_bytes(one['bytes'])} free")
        for one, free in zip(probe["devices"], probe["free"], strict=True)
    ]
    return Device(findings, min(probe["free"]), is_cuda=True)


def _cpu(probe: Mapping[str, Any], wanted: str, has_nvidia: bool) -> Finding:
    text = f"CPU, {probe['threads']} threads, {probe['capability']}"
    if wanted == "cuda":
        return fail("device", "CUDA is asked for, but torch finds no CUDA device", _cuda_remedy(probe))
    if has_nvidia and wanted == "auto":
        return warn("device", f"{text}; the NVIDIA device of this machine is not used", _cuda_remedy(probe))
    if probe["capability"] in ("DEFAULT", "NO AVX"):
        return warn("device", f"{text}: no AVX2, so it is slow", "use a processor with AVX2 or AVX-512")
    return ok("device", text)


def _cuda_remedy(probe: Mapping[str, Any]) -> str:
    if not probe["built_for_cuda"]:
        return f"torch {probe['torch']} is built without CUDA: install a CUDA build"
    return "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"


def available_bytes(file: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes can take without swapping; None if this system does not say."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
