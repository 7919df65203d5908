"""Paged attention on CUDA by Triton kernels: blocks of any size, heads of up to 256 elements, every feature.

A row sees the tokens of its own sequence up to itself, and a batch may be computed again after a failure.
Launches depend on shapes alone (the number of decode rows and the width of their tables), so a decode step
whose tensors are on the device can be captured in a CUDA graph and replayed with other lengths and tables.
The bits of a decode row depend on its sequence and length, not on the batch. The kernels read only slots that
the sequence has written, so no block is zeroed when it is begun.
"""

from typing import NamedTuple

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import (
    AttentionBatch,
    Chunk,
    DecodeRows,
    LayerCall,
    PoolShape,
    unsupported_shape,
)
from engine.execution.attention.kv_pool import KVPool
from engine.execution.attention.triton_launch import (
    DTYPES,
    IS_COMPILED,
    Layer,
    attend_decode_rows,
    attend_tiles,
    store,
)
from engine.execution.machine.async_copy import copy_to_device
from engine.execution.machine.memory import dense

MAX_HEAD_DIM = 256
"""Accumulators of larger heads do not fit into a program's registers."""
MAX_GROUP = 128
"""Query heads that may share a KV head, for the same reason."""
ALIGNMENT = 16
"""Triton specialises kernels for strides that are multiples of this many elements."""


class TritonAttention:
    """A KV pool of `shape`, and attention over it. Raises `UnsupportedModel` for unsupported shapes."""

    def __init__(self, shape: PoolShape) -> None:
        reason = unsupported_shape(shape, dtypes=DTYPES, max_head_dim=MAX_HEAD_DIM, max_group=MAX_GROUP)
        if IS_COMPILED and shape.device.type != "cuda":
            reason = f"the device {shape.device}"
        if reason:
            raise UnsupportedModel(f"the Triton attention does not support {reason}")
        self.pool = KVPool(shape)

    def build_metadata(self, batch: AttentionBatch) -> "TritonMetadata":
        moved = batch.on(self.pool.device)
        tiles = _decode_tiles(moved.decode_rows, moved.decode_lengths, moved.decode_tables)
        chunks = _Chunks.of(batch.chunks, [chunk.table for chunk in moved.chunks])
        return TritonMetadata(self.pool, moved.slot_mapping, tiles, moved.decode_tables, chunks)

    def build_decode_metadata(self, rows: DecodeRows) -> "TritonMetadata":
        """See `GraphableBackend`. No kernel reads table entries after a row's length."""
        all_rows = torch.arange(len(rows.slot_mapping), device=rows.slot_mapping.device)
        tiles = _decode_tiles(all_rows, rows.lengths, rows.tables)
        return TritonMetadata(self.pool, rows.slot_mapping, tiles, rows.tables, None)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.zero_blocks(blocks)


class _Chunks(NamedTuple):
    """The chunks of a batch, on the host, and their concatenated `tables`, on the device."""

    parts: tuple[Chunk, ...]
    tables: torch.Tensor

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], tables: list[torch.Tensor]) -> "_Chunks | None":
        """None without chunks."""
        if not tables:
            return None
        return cls(chunks, torch.cat(tables) if len(tables) > 1 else tables[0])


class TritonMetadata:
    """One forward pass. Tiles are computed once for all layers with the same tiling."""

    def __init__(
        self,
        pool: KVPool,
        slot_mapping: torch.Tensor,
        decode_tiles: torch.Tensor,
        decode_tables: torch.Tensor,
        chunks: _Chunks | None,
    ) -> None:
        self._pool = pool
        self._slot_mapping = slot_mapping
        self._chunks = chunks
        self._decode_tiles = decode_tiles
        self._decode_tables = decode_tables
        self._chunk_tiles: dict[int, torch.Tensor] = {}

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        layer = Layer(call, _regular(query), keys, values, out)
        store(layer, self._slot_mapping, _regular(key), _regular(value))
        if len(self._decode_tiles):
            attend_decode_rows(layer, self._decode_tiles, self._decode_tables)
        if self._chunks is not None:
            tiling = layer.tiling(decode=False)
            tiles = self._tiles(self._chunks.parts, tiling.block_m // layer.group)
            attend_tiles(layer, tiling, tiles, self._chunks.tables)
        return layer.out

    def _tiles(self, chunks: tuple[Chunk, ...], num_queries: int) -> torch.Tensor:
        if num_queries not in self._chunk_tiles:
            tiles = _chunk_tiles(chunks, num_queries)
            self._chunk_tiles[num_queries] = copy_to_device(tiles, self._pool.device)
        return self._chunk_tiles[num_queries]


def _regular(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [rows, heads, size] in a layout for which the compiled variant does not depend on their number.

    Triton compiles one variant for strides that are multiples of 16 and another for other strides. Strides
    are multiples of the head size; if that is not a multiple of 16, strided views may have either.
    """
    if rows.shape[-1] % ALIGNMENT == 0:
        return dense(rows)
    return rows.clone(memory_format=torch.contiguous_format)


def _decode_tiles(rows: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """A tile for each decode row, computed on the device of these tensors, without a synchronisation."""
    num_rows, width = tables.shape
    offsets = torch.arange(num_rows, device=rows.device) * width
    return torch.stack([rows, torch.ones_like(rows), lengths, offsets], dim=1)


def _chunk_tiles(chunks: tuple[Chunk, ...], num_queries: int) -> torch.Tensor:
    """Tiles of up to `num_queries` queries. Those that see most come first, so that no long one ends last."""
    parts = []
    offset = 0
    for chunk in chunks:
        first = torch.arange(0, chunk.num_rows, num_queries)
        counts = (chunk.num_rows - first).clamp(max=num_queries)
        table = torch.full_like(first, offset)
        parts.append(torch.stack([chunk.first_row + first, counts, chunk.start + 1 + first, table], dim=1))
        offset += len(chunk.table)
    tiles = torch.cat(parts)
    return tiles[tiles[:, 2].argsort(descending=True, stable=True)]
