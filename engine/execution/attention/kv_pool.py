"""The KV pool of the torch and Triton backends.

Per layer: keys [blocks, block_size, kv heads, head_dim] and values likewise. A slot is read only after its
sequence wrote it or after it was zeroed for that sequence. So the pool is not cleared when blocks change
hands, and a non-finite value cannot reach another sequence through a masked slot (0 x NaN = NaN).
"""

import torch

from engine.execution.attention.interface import AttentionBatch, LayerSpec, PoolShape
from engine.execution.machine.async_copy import copy_to_device


class KVPool:
    """Keys and values of each layer. Block 0, the null block, contains zeros."""

    def __init__(self, shape: PoolShape) -> None:
        self.block_size = shape.block_size
        self.device = shape.device
        self.keys = tuple(_blocks(shape, spec.num_kv_heads, spec.head_dim) for spec in shape.layers)
        self.values = tuple(_blocks(shape, spec.num_kv_heads, spec.value_dim) for spec in shape.layers)

    @staticmethod
    def bytes_per_block(specs: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers together."""
        return block_size * dtype.itemsize * sum(spec.kv_size for spec in specs)

    def prepare(self, batch: AttentionBatch) -> None:
        """Zero the slots that the batch's sequences may read before they write them."""
        if len(batch.blocks_begun):
            self._zero(batch.on(self.device).blocks_begun)

    def store(self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the rows of `key` and `value` [rows, kv heads, size] to the slots `slot_mapping` [rows]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self._zero(copy_to_device(torch.tensor(blocks), self.device))

    def _zero(self, blocks: torch.Tensor) -> None:
        for pool in (*self.keys, *self.values):
            pool.index_fill_(0, blocks, 0)


def _blocks(shape: PoolShape, num_kv_heads: int, size: int) -> torch.Tensor:
    """Blocks that are not zeroed, except the null block, so that unused memory is not touched."""
    blocks = torch.empty(
        (shape.num_blocks, shape.block_size, num_kv_heads, size), dtype=shape.dtype, device=shape.device
    )
    blocks[0].zero_()
    return blocks
