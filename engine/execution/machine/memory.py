"""Memory of a device: how much is free, how to release it, and tensors in huge pages."""

import gc
import mmap
import os
import resource
from contextlib import suppress
from pathlib import Path

import torch

from engine.errors import InvalidParameter

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Version 2, then 1: directory, limit, usage, and the name in memory.stat of droppable file caches."""
_FREE_FRACTION = 2
"""A system that reports only its total memory is assumed to have one part in this many free."""

PAGE = 1 << 21
ALIGNMENT = 64
"""Bytes of a cache line."""
CHUNK = 1 << 26
"""Bytes that `HugePageAllocator` maps at a time."""


def known_free_bytes(device: torch.device) -> int | None:
    """`free_bytes`, or None on a system that does not report its memory."""
    try:
        return free_bytes(device)
    except InvalidParameter:
        return None


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`, within the limits of the container and the process.

    On CUDA, the allocator's unused cache is released first, as the driver counts it as used.
    """
    if device.type == "cuda":
        gc.collect()
        release_cached_memory(device)
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available_bytes(), *_container_bytes(), *_process_bytes()])


def release_cached_memory(device: torch.device) -> bool:
    """Return the CUDA allocator's unused cache to the driver. Returns whether any was released.

    Does nothing on a CPU.
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
        return _physical_bytes() // _FREE_FRACTION


def _physical_bytes() -> int:
    """Total memory of a system without /proc, such as macOS."""
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError) as error:
        raise _unknown_memory() from error
    # POSIX: -1 means "not known".
    if pages < 1 or page_bytes < 1:
        raise _unknown_memory()
    return pages * page_bytes


def _unknown_memory() -> InvalidParameter:
    return InvalidParameter("num_kv_blocks", "must be set here: the system does not say what memory it has")


def _process_bytes() -> list[int]:
    """What the process's address space limit (`ulimit -v`) leaves; empty without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return [limit]
    return [max(0, limit - used)]


def _container_bytes() -> list[int]:
    """What the control group's limits leave; empty without one. File caches that can be dropped are free."""
    left = []
    for directory, limit, usage, droppable in _CGROUP_FILES:
        group = _CGROUP / directory
        try:
            maximum, used = (int((group / name).read_text()) for name in (limit, usage))
            stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # The other version of control groups, or "max": no limit.
            continue
        left.append(maximum - used + int(stats.get(droppable, 0)))
    return left


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, copied if the elements of its last dimension are not adjacent."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def huge_page_zeros(numel: int, dtype: torch.dtype, *, offset: int = 0) -> torch.Tensor:
    """A tensor [numel] of zeros in pages of 2 MB where Linux provides them, and in small pages elsewhere.

    Weights and KV pools are read from end to end in each step; huge pages need fewer address translations.
    Memory that is never written is not allocated.

    `offset`: bytes between the start of a page and the tensor. The kernel allocates a page at its first
    write; tensors that fill at the same pace and have different offsets do not all need a page at once.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes < PAGE:
        return torch.zeros(numel, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without huge pages refuses.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE + offset
    return whole[begin : begin + num_bytes].view(dtype)


class HugePageAllocator:
    """Cuts small tensors from shared huge pages. For one thread."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [numel] of zeros that overlaps no other. It keeps its chunk alive."""
        num_bytes = numel * dtype.itemsize
        aligned = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if aligned > CHUNK // 4:
            return huge_page_zeros(numel, dtype)
        if aligned > len(self._rest):
            self._rest = huge_page_zeros(CHUNK, torch.uint8)
        piece, self._rest = self._rest[:num_bytes], self._rest[aligned:]
        return piece.view(dtype)
