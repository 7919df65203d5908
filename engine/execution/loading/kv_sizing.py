"""How many KV blocks there shall be: what the limits can use at most, within a share of the free memory."""

import gc
import os
import resource
from pathlib import Path

import torch

from engine.errors import InvalidParameter

CPU_SHARE = 0.4
CUDA_SHARE = 0.85
"""Of the memory that is free after the model is loaded. A CPU's memory is other programs' too."""

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")
_FREE_PART = 2
"""Where only all of the memory is known, one part in so many is taken as free."""


def choose_num_kv_blocks(
    *, max_tokens: int, block_size: int, bytes_per_block: int, free_bytes: int, share: float
) -> int:
    """Usable blocks: enough for `max_tokens`, if these fit into `share` of `free_bytes`, else what fits.

    One more, the null block, is counted as memory. Raises `InvalidParameter` when none fits.
    """
    if not 0 < share <= 1:
        raise InvalidParameter("kv_memory_share", f"must be above 0 and at most 1, not {share!r}")
    affordable = int(free_bytes * share) // bytes_per_block - 1
    if affordable < 1:
        raise InvalidParameter(
            "num_kv_blocks",
            f"{share:.0%} of the {free_bytes >> 20} MiB of free memory hold no KV block of"
            f" {bytes_per_block >> 10} KiB; free some memory or use a smaller model",
        )
    return min(affordable, -(-max_tokens // block_size))


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


def release_cached_memory(device: torch.device) -> None:
    """Return memory of tensors that are gone to the driver. On a CPU nothing is kept."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
