"""Seconds of work on a device, and how fast the device copies memory.

A time starts when all earlier work of the device is done and ends when its own work is done.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.parts import Options

COPY_BYTES = {True: 1 << 26, False: 1 << 32}
"""By `quick`; not quick: more than any cache holds."""


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, repeats: int, inner: int = 1) -> float:
    """The median of a call, without the first. `inner`: calls that are timed together."""
    work()
    times = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(inner):
            work()
        wait_for(device)
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def memory(options: Options) -> dict[str, Any]:
    """Facts of the device, and the bytes per second that a copy of tensors reads and writes."""
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
