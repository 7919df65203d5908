"""Reports and releases the memory of a device."""

import gc
import os
import resource
from pathlib import Path

import torch

from engine.errors import InvalidParameter

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")
_FREE_PART = 2
"""Where only all of the memory is known, one part in so many is taken as free."""


def known_free_bytes(device: torch.device) -> int | None:
    """`free_bytes`; None on a system that does not say what memory it has."""
    try:
        return free_bytes(device)
    except InvalidParameter:
        return None


def free_bytes(device: torch.device) -> int:
    """Memory that may still be taken on `device`: what limits of the container and of the process leave.

    On CUDA, memory that torch keeps for tensors that are gone is freed first: the driver counts it as used.
    """
    if device.type == "cuda":
        gc.collect()
        release_cached_memory(device)
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available_bytes(), *_container_bytes(), *_process_bytes()])


def release_cached_memory(device: torch.device) -> bool:
    """Return to the driver what the CUDA allocator caches and no tensor uses; whether there was any.

    A CPU's memory is not cached.
    """
    if device.type != "cuda":
        return False
    num_reserved = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) < num_reserved


def _available_bytes() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return _physical_bytes() // _FREE_PART


def _physical_bytes() -> int:
    """All memory of a system without /proc, such as macOS."""
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError) as error:
        raise _unknown_memory() from error
    # POSIX: -1 is "not known".
    if pages < 1 or page_bytes < 1:
        raise _unknown_memory()
    return pages * page_bytes


def _unknown_memory() -> InvalidParameter:
    return InvalidParameter("num_kv_blocks", "must be set here: the system does not say what memory it has")


def _process_bytes() -> list[int]:
    """What the limit of the process's address space (`ulimit -v`) leaves, if it has one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return [limit]
    return [max(0, limit - used)]


def _container_bytes() -> list[int]:
    """What the limits of the control group leave, if it has any. File caches that can be dropped are free."""
    left = []
    for limit, usage, stat, droppable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most, used = (int((_CGROUP / name).read_text()) for name in (limit, usage))
            stats = dict(line.split() for line in (_CGROUP / stat).read_text().splitlines())
        except (OSError, ValueError):
            # Another version of control groups, or "max": no limit.
            continue
        left.append(most - used + int(stats.get(droppable, 0)))
    return left
