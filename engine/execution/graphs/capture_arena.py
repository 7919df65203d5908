"""The memory of intermediate results of captured CPU graphs.

A region is reused once no tensor views it, as it is without graphs, so the memory stays small and in the
processor's caches. A replay makes the same calls in the same order, so it does not read a region after its
reuse. All graphs share the memory, as one runs at a time; a tensor that outlives its capture keeps its
region. For one thread.
"""

import ctypes
import weakref
from bisect import bisect_left
from functools import partial

import torch

from engine.execution.machine.memory import ALIGNMENT, huge_page_zeros


class ArenaFull(Exception):
    """No region of the requested size is free."""


class CaptureArena:
    """Regions in `num_bytes` of address space. Memory that is never written is not allocated."""

    def __init__(self, num_bytes: int) -> None:
        self._whole = huge_page_zeros(num_bytes, torch.uint8)
        self._address = self._whole.data_ptr()
        self._bytes = (ctypes.c_char * num_bytes).from_address(self._address)
        #: (begin, end) of free regions, ascending, none adjacent.
        self._free = [(0, num_bytes)]
        #: The owners of allocated regions, by begin.
        self._owners: dict[int, weakref.ref[object]] = {}
        self.peak_bytes = 0
        """The end of the highest region ever allocated."""

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a non-empty tensor, of the same strides, in a region of its own.

        The region is free again once neither the copy nor a view of it exists. Raises `ArenaFull`.
        """
        numel = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = numel * tensor.itemsize
        begin, end = self._allocate(num_bytes)
        # The storage, and so every view, keeps the owner alive.
        owner = (ctypes.c_char * num_bytes).from_buffer(self._bytes, begin)
        self._owners[begin] = weakref.ref(owner, partial(self._release, begin, end))
        copy = torch.frombuffer(owner, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return copy.copy_(tensor)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view that does not keep its region; `tensor` itself if it is not in the arena."""
        if tensor.layout != torch.strided:
            return tensor
        begin = tensor.data_ptr() - self._address
        if not 0 <= begin < len(self._bytes):
            return tensor
        whole = self._whole.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), begin // tensor.itemsize)

    def _allocate(self, num_bytes: int) -> tuple[int, int]:
        needed = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= needed:
                self._free[index : index + 1] = [(begin + needed, end)] if end - begin > needed else []
                self.peak_bytes = max(self.peak_bytes, begin + needed)
                return begin, begin + needed
        raise ArenaFull(f"{needed} bytes for a graph's intermediate results are not available")

    def _release(self, begin: int, end: int, _: object) -> None:
        del self._owners[begin]
        index = bisect_left(self._free, (begin, end))
        after = self._free[index : index + 1]
        if after and after[0][0] == end:
            end = after[0][1]
            del self._free[index]
        if index and self._free[index - 1][1] == begin:
            begin = self._free[index - 1][0]
            index -= 1
            del self._free[index]
        self._free.insert(index, (begin, end))
