"""Seconds of work on a device, and how fast the device copies memory.

Law: a time is that of the device: it begins when all work before is done, and ends when its own is.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.parts import Options

COPY_BYTES = {True: 1 << 26, False: 1 << 32}
"""By `quick`: more than any cache holds, and what every machine has."""


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, repeats: int, inner: int = 1) -> float:
    """The median of a call, the first not counted. `inner`: calls that are timed together."""
    work()
    taken = []
    for _ in range(repeats):
        wait_for(device)
        begun = time.perf_counter()
        for _ in range(inner):
            work()
        wait_for(device)
        taken.append((time.perf_counter() - begun) / inner)
    return statistics.median(taken)


def memory(options: Options) -> dict[str, Any]:
    """What the device is, and the bytes per second that a copy of tensors there reads and writes."""
    source = torch.ones(COPY_BYTES[options.quick] // 4, device=options.device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), options.device, repeats=3 if options.quick else 9)
    facts: dict[str, Any] = {"bytes_per_second": 2 * source.numel() * 4 / seconds}
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts
