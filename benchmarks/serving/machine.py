"""What the machine is and how busy, for the file of results. Linux. Knows no engine."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
"""Of the processor, those that decide on speed."""


def machine_facts(root: Path) -> dict[str, Any]:
    """`root`: of the working tree, whose commit is reported."""
    cpu = _pairs(Path("/proc/cpuinfo"))
    flags = set(cpu.get("flags", "").split())
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_bytes": int(_pairs(Path("/proc/meminfo"))["MemTotal"].split()[0]) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(root),
    }


def available_bytes() -> int:
    return int(_pairs(Path("/proc/meminfo"))["MemAvailable"].split()[0]) * 1024


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def _pairs(file: Path) -> dict[str, str]:
    """Lines of a name, a colon and a value; of several of one name the first."""
    pairs: dict[str, str] = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        pairs.setdefault(name.strip(), value.strip())
    return pairs


def _commit(root: Path) -> str:
    """With a plus where files differ from it; empty outside of git."""
    said = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()
