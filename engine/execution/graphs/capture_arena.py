"""The memory of what graphs of a CPU compute on the way. A place is given again as soon as nobody looks at
what is there, as it is without graphs: so it stays small, and within the processor's caches.

Law: what is looked at at one time of a capture lies in different places. A replay makes the same calls in the
same order, so what nobody looked at any more is not read later either. All graphs share the memory, as only
one runs at a time; what outlives its capture keeps its place. For one thread.
"""

import ctypes
import weakref
from bisect import bisect_left
from functools import partial

import torch

from engine.execution.machine.memory import ALIGNMENT, huge_page_zeros


class NoRoom(Exception):
    """There is no place of that size left."""


class CaptureArena:
    """Places in `num_bytes` of addresses: what is never written takes no memory."""

    def __init__(self, num_bytes: int) -> None:
        self._whole = huge_page_zeros(num_bytes, torch.uint8)
        self._address = self._whole.data_ptr()
        self._bytes = (ctypes.c_char * num_bytes).from_address(self._address)
        #: Begin and end of what is free, ascending, no two side by side.
        self._holes = [(0, num_bytes)]
        #: Where somebody is, until he goes.
        self._tenants: dict[int, weakref.ref[object]] = {}
        self.most_bytes = 0
        """Of the front part that has ever been used."""

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like the given one in a place of its own, for as long as somebody has it or a view of it.

        `tensor` has numbers. Raises `NoRoom`.
        """
        numbers = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = numbers * tensor.itemsize
        begin, end = self._take(num_bytes)
        # The storage holds this object, and so do all views.
        tenant = (ctypes.c_char * num_bytes).from_buffer(self._bytes, begin)
        self._tenants[begin] = weakref.ref(tenant, partial(self._leave, begin, end))
        copy = torch.frombuffer(tenant, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return copy.copy_(tensor)

    def name(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers under another name, which keeps no place; what lies elsewhere as it is."""
        if tensor.layout != torch.strided:
            return tensor
        begin = tensor.data_ptr() - self._address
        if not 0 <= begin < len(self._bytes):
            return tensor
        whole = self._whole.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), begin // tensor.itemsize)

    def _take(self, num_bytes: int) -> tuple[int, int]:
        needed = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for index, (begin, end) in enumerate(self._holes):
            if end - begin >= needed:
                self._holes[index : index + 1] = [(begin + needed, end)] if end - begin > needed else []
                self.most_bytes = max(self.most_bytes, begin + needed)
                return begin, begin + needed
        raise NoRoom(f"no {needed} bytes are left for what a graph computes")

    def _leave(self, begin: int, end: int, _: object) -> None:
        del self._tenants[begin]
        index = bisect_left(self._holes, (begin, end))
        after = self._holes[index : index + 1]
        if after and after[0][0] == end:
            end = after[0][1]
            del self._holes[index]
        if index and self._holes[index - 1][1] == begin:
            begin = self._holes[index - 1][0]
            index -= 1
            del self._holes[index]
        self._holes.insert(index, (begin, end))
