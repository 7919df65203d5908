"""The memory of a fake CUDA device, as torch's caching allocator divides it.

A model of `CUDACachingAllocator`: small blocks share segments of 2 MiB, medium ones of 20 MiB, and large ones
have their own segments. A freed block stays in its segment, which counts as used until `empty_cache` or until
memory runs out. Streams and graphs are not modelled.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20


@dataclass(eq=False)
class _Block:
    size: int
    is_free: bool = True


@dataclass(eq=False)
class _Segment:
    size: int
    is_small: bool
    blocks: list[_Block] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return all(block.is_free for block in self.blocks)

    def merge(self) -> None:
        """Join free neighbours."""
        merged: list[_Block] = []
        for block in self.blocks:
            if merged and merged[-1].is_free and block.is_free:
                merged[-1].size += block.size
            else:
                merged.append(block)
        self.blocks = merged


@dataclass(eq=False)
class _Held:
    """A block and the storages of all tensors that view it; fake views have their own."""

    storages: list[StorageWeakRef]
    segment: _Segment
    block: _Block


def _on_device(given: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(given)
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.device.type == "cuda"]


class FakeMemory(TorchDispatchMode):
    """Counts the storages of fake tensors on the device. Must be entered after the fake mode."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.peak = 0
        self._segments: list[_Segment] = []
        self._held: list[_Held] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None for one in func._schema.returns)
        viewed = self._find(next(iter(_on_device(args)), None)) if is_view else None
        for one in _on_device(result):
            if self._find(one) is None:
                self._hold(one.untyped_storage(), viewed)
        return result

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return self.total - self._reserved, self.total

    def empty_cache(self) -> None:
        self._sweep()
        self._segments = [segment for segment in self._segments if not segment.is_free]

    @property
    def _reserved(self) -> int:
        return sum(segment.size for segment in self._segments)

    def _find(self, tensor: torch.Tensor | None) -> _Held | None:
        if tensor is None:
            return None
        storage = StorageWeakRef(tensor.untyped_storage())
        return next((held for held in self._held if storage in held.storages), None)

    def _hold(self, storage: torch.UntypedStorage, viewed: _Held | None) -> None:
        ref = StorageWeakRef(storage)
        if viewed is not None:
            viewed.storages.append(ref)
            return
        self._sweep()
        size = -(-max(storage.nbytes(), 1) // 512) * 512
        self._held.append(_Held([ref], *self._take(size)))

    def _sweep(self) -> None:
        """Free the blocks of storages that no tensor uses."""
        for held in self._held:
            held.storages = [ref for ref in held.storages if not ref.expired()]
            if not held.storages:
                held.block.is_free = True
                held.segment.merge()
        self._held = [held for held in self._held if held.storages]

    def _take(self, size: int) -> tuple[_Segment, _Block]:
        is_small = size <= MIB
        fitting = [
            (block.size, at, segment, block)
            for at, segment in enumerate(self._segments)
            if segment.is_small == is_small
            for block in segment.blocks
            if block.is_free and block.size >= size
        ]
        if fitting:
            *_, segment, block = min(fitting, key=lambda one: one[:2])
        else:
            segment = self._segment(size, is_small)
            block = segment.blocks[0]
        if block.size - size >= (512 if is_small else MIB):
            segment.blocks.insert(segment.blocks.index(block) + 1, _Block(block.size - size))
            block.size = size
        block.is_free = False
        return segment, block

    def _segment(self, size: int, is_small: bool) -> _Segment:
        wanted = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self._reserved + wanted > self.total:
            self.empty_cache()
        if self._reserved + wanted > self.total:
            raise torch.OutOfMemoryError(f"no {size >> 20} MiB beside {self._reserved >> 20} MiB")
        segment = _Segment(wanted, is_small, [_Block(wanted)])
        self._segments.append(segment)
        self.peak = max(self.peak, self._reserved)
        return segment
