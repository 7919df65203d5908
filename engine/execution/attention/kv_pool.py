"""The memory that keys and values of all running sequences live in.

Law: a slot is read only after its sequence wrote it, or after it was zeroed for that sequence. So the pool
needs no clearing, and a value that is not finite cannot reach another sequence through a masked slot
(0 x NaN = NaN). This file does not know how attention is computed.

The layout, per layer: keys [blocks, block_size, kv heads, head_dim], values likewise.
"""

import torch

from engine.execution.attention.interface import AttentionBatch, LayerSpec, PoolShape
from engine.execution.machine.async_copy import copy_to_device


class KVPool:
    """Keys and values of each layer; block 0 is nobody's and holds zeros."""

    def __init__(self, shape: PoolShape) -> None:
        self.block_size = shape.block_size
        self.device = shape.device
        self.keys = tuple(_blocks(shape, spec.num_kv_heads, spec.head_dim) for spec in shape.layers)
        self.values = tuple(_blocks(shape, spec.num_kv_heads, spec.value_dim) for spec in shape.layers)

    @staticmethod
    def bytes_per_block(specs: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        """What one block takes in all layers together."""
        return block_size * dtype.itemsize * sum(spec.kv_size for spec in specs)

    def prepare(self, batch: AttentionBatch) -> None:
        """Zero what the batch's sequences may read before they have written it."""
        if len(batch.blocks_begun):
            self._zero(batch.on(self.device).blocks_begun)

    def store(self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one row of `key` [rows, kv heads, head_dim] and `value` to each of `slot_mapping` [rows]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        """Forget what these blocks hold."""
        self._zero(copy_to_device(torch.tensor(blocks), self.device))

    def _zero(self, blocks: torch.Tensor) -> None:
        for pool in (*self.keys, *self.values):
            pool.index_fill_(0, blocks, 0)


def _blocks(shape: PoolShape, num_kv_heads: int, size: int) -> torch.Tensor:
    """Not zeroed, but for the null block: memory that is not used yet is then not touched."""
    sizes = (shape.num_blocks, shape.block_size, num_kv_heads, size)
    blocks = torch.empty(sizes, dtype=shape.dtype, device=shape.device)
    blocks[0].zero_()
    return blocks
