"""Paged attention on CUDA by Triton kernels: blocks of any size, heads up to 256 numbers, every feature.

Law: as for every backend, a row sees the tokens of its own sequence up to itself and nothing else, and a
batch may be computed again after a failure. What is launched follows from shapes alone: how many single rows
there are and how wide their tables, never from lengths or blocks. So a step of single rows whose tensors are
on the device already may be recorded in a CUDA graph and played over other lengths and tables in the same
places. The bits of a single row follow from its sequence and length, whatever is computed beside it.

The kernels read only what the sequence has written, so no block is zeroed when it is begun.
"""

from typing import NamedTuple

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import AttentionBatch, Chunk, DecodeRows, LayerCall, PoolShape
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

MOST_SIZE = 256
"""The largest head that is taken: the sums of a larger one would not fit a program's registers."""
MOST_GROUP = 128
"""As many heads may share a KV head, for the same reason."""


ALIGNMENT = 16
"""What Triton looks for in strides, in numbers."""


class TritonAttention:
    """A KV pool of `shape`, and attention over it.

    Raises `UnsupportedModel` for what the kernels do not take.
    """

    def __init__(self, shape: PoolShape) -> None:
        if reason := refusal(shape):
            raise UnsupportedModel(f"the Triton attention does not take {reason}")
        self.pool = KVPool(shape)

    def build_metadata(self, batch: AttentionBatch) -> "TritonMetadata":
        there = batch.on(self.pool.device)
        singles = _decode_tiles(there.decode_rows, there.decode_lengths, there.decode_tables)
        chunks = _Chunks.of(batch.chunks, [chunk.table for chunk in there.chunks])
        return TritonMetadata(self.pool, there.slot_mapping, singles, there.decode_tables, chunks)

    def build_decode_metadata(self, rows: DecodeRows) -> "TritonMetadata":
        """See `GraphableBackend`: whatever tables name behind a row's length, no kernel looks there."""
        all_rows = torch.arange(len(rows.slot_mapping), device=rows.slot_mapping.device)
        singles = _decode_tiles(all_rows, rows.lengths, rows.tables)
        return TritonMetadata(self.pool, rows.slot_mapping, singles, rows.tables, None)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.zero_blocks(blocks)


def refusal(shape: PoolShape) -> str | None:
    """What of this the kernels do not take; None if they take all."""
    if IS_COMPILED and shape.device.type != "cuda":
        return f"the device {shape.device}"
    if shape.dtype not in DTYPES:
        return f"the dtype {shape.dtype}"
    for spec in shape.layers:
        if max(spec.head_dim, spec.value_dim) > MOST_SIZE:
            return f"heads of more than {MOST_SIZE} numbers"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads that share {spec.num_kv_heads} KV heads"
        if spec.num_heads // spec.num_kv_heads > MOST_GROUP:
            return f"more than {MOST_GROUP} heads that share a KV head"
    return None


class _Chunks(NamedTuple):
    """A step's chunks, on the host, and all their `tables`, one after the other, on the device."""

    parts: tuple[Chunk, ...]
    tables: torch.Tensor

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], tables: list[torch.Tensor]) -> "_Chunks | None":
        """None without chunks."""
        if not tables:
            return None
        return cls(chunks, torch.cat(tables) if len(tables) > 1 else tables[0])


class TritonMetadata:
    """One forward: where its tiles begin is written down once for all layers that are cut alike."""

    def __init__(
        self,
        pool: KVPool,
        slot_mapping: torch.Tensor,
        singles: torch.Tensor,
        decode_tables: torch.Tensor,
        chunks: _Chunks | None,
    ) -> None:
        self._pool = pool
        self._slot_mapping = slot_mapping
        self._chunks = chunks
        self._singles = singles
        self._single_tables = decode_tables
        self._chunk_tiles: dict[int, torch.Tensor] = {}

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        layer = Layer(call, _regular(query), keys, values, out)
        store(layer, self._slot_mapping, _regular(key), _regular(value))
        if len(self._singles):
            attend_decode_rows(layer, self._singles, self._single_tables)
        if self._chunks is not None:
            cut = layer.tiling(single=False)
            tiles = self._tiles(self._chunks.parts, cut.block_m // layer.group)
            attend_tiles(layer, cut, tiles, self._chunks.tables)
        return layer.out

    def _tiles(self, chunks: tuple[Chunk, ...], num_queries: int) -> torch.Tensor:
        if num_queries not in self._chunk_tiles:
            tiles = _chunk_tiles(chunks, num_queries)
            self._chunk_tiles[num_queries] = copy_to_device(tiles, self._pool.device)
        return self._chunk_tiles[num_queries]


def _regular(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [rows, heads, size] in a layout whose variant of a kernel does not depend on how many there are.

    Triton compiles one variant for strides that are multiples of 16 and another for all others. Strides are
    multiples of the heads' size; where that is none of 16, heads that lie apart may have either.
    """
    if rows.shape[-1] % ALIGNMENT == 0:
        return dense(rows)
    return rows.clone(memory_format=torch.contiguous_format)


def _decode_tiles(rows: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """A tile for each single row, made where these tensors are: nothing is asked of a device."""
    num_singles, width = tables.shape
    begins = torch.arange(num_singles, device=rows.device) * width
    return torch.stack([rows, torch.ones_like(rows), lengths, begins], dim=1)


def _chunk_tiles(chunks: tuple[Chunk, ...], num_queries: int) -> torch.Tensor:
    """Tiles of up to `num_queries` queries; those that see most come first, so that no long one ends last."""
    parts = []
    begins = 0
    for chunk in chunks:
        first = torch.arange(0, chunk.num_rows, num_queries)
        counts = (chunk.num_rows - first).clamp(max=num_queries)
        table = torch.full_like(first, begins)
        parts.append(torch.stack([chunk.first_row + first, counts, chunk.start + 1 + first, table], dim=1))
        begins += len(chunk.table)
    tiles = torch.cat(parts)
    return tiles[tiles[:, 2].argsort(descending=True, stable=True)]
