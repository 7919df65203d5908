"""Paged attention on a CPU by the native operator: one pass over keys and values where they lie.

Law: as for every backend, a row sees the tokens of its own sequence up to itself and nothing else, and a
batch may be computed again after a failure. More holds here: a row's bits follow from its sequence and its
position, whatever is computed beside it, in whatever chunks, by however many threads. The operator reads
only what the sequence has written, so no block is zeroed when it is begun.

How the pool is laid out and what is computed stands in `native/`.
"""

from dataclasses import dataclass

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import AttentionBatch, DecodeRows, LayerCall, LayerSpec, PoolShape
from engine.execution.attention.native_operator import GROUP, MOST_SIZE, AttentionOperator, NativeCall
from engine.execution.machine.memory import ALIGNMENT, PAGE, dense, huge_page_zeros
from engine.execution.machine.native_library import DTYPES


@dataclass(frozen=True, slots=True)
class NativePool:
    """For each layer, one tensor of `AttentionOperator.group_numbers` values per group of `GROUP` slots."""

    shape: PoolShape
    layers: tuple[torch.Tensor, ...]


class NativeAttention:
    """A KV pool of `shape`, and attention over it.

    Raises `UnsupportedModel` for what the operator does not take.
    """

    def __init__(self, operator: AttentionOperator, shape: PoolShape) -> None:
        if reason := refusal(shape):
            raise UnsupportedModel(f"the native attention does not take {reason}")
        self._operator = operator
        num_groups = -(-shape.num_blocks * shape.block_size // GROUP)
        # Memory that is not used yet is not touched, and no step is the first in a page of every layer.
        apart = PAGE // ALIGNMENT // max(1, len(shape.layers)) * ALIGNMENT
        layers = (
            huge_page_zeros(num_groups * operator.group_numbers(spec), shape.dtype, offset=index * apart)
            for index, spec in enumerate(shape.layers)
        )
        self.pool = NativePool(shape, tuple(layers))
        self.zero_blocks((0,))

    def build_metadata(self, batch: AttentionBatch) -> "NativeMetadata":
        return NativeMetadata(self._operator, self.pool, batch.slot_mapping.contiguous(), *_spans(batch))

    def build_decode_metadata(self, rows: DecodeRows) -> "NativeMetadata":
        places = torch.arange(len(rows.slot_mapping))
        spans = torch.ones(len(places), 4, dtype=torch.int64)
        spans[:, 0] = places
        spans[:, 2] = rows.lengths - 1
        spans[:, 3] = places * rows.tables.stride(0)
        return NativeMetadata(self._operator, self.pool, rows.slot_mapping, spans, rows.tables)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        block_size = self.pool.shape.block_size
        slot_mapping = (torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)).flatten()
        for spec, layer in zip(self.pool.shape.layers, self.pool.layers, strict=True):
            self._operator.forget(layer, slot_mapping, spec)


def bytes_per_block(
    operator: AttentionOperator, specs: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype
) -> int:
    """What one block takes in all layers together."""
    return -(-block_size * dtype.itemsize * sum(map(operator.group_numbers, specs)) // GROUP)


def refusal(shape: PoolShape) -> str | None:
    """What of this the operator does not take; None if it takes all."""
    if shape.device.type != "cpu":
        return f"the device {shape.device}"
    if shape.dtype not in DTYPES:
        return f"the dtype {shape.dtype}"
    for spec in shape.layers:
        if max(spec.head_dim, spec.value_dim) > MOST_SIZE:
            return f"heads of more than {MOST_SIZE} numbers"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads that share {spec.num_kv_heads} KV heads"
    return None


class NativeMetadata:
    """One forward: what its layers have in common is written down once. `spans`: see `_spans`."""

    def __init__(
        self,
        operator: AttentionOperator,
        pool: NativePool,
        slot_mapping: torch.Tensor,
        spans: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        self._operator = operator
        self._pool = pool
        self._slot_mapping = slot_mapping
        self._spans = spans
        self._tables = tables

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As `AttentionMetadata` has it. Raises `UnsupportedModel` for what the pool was not made for."""
        pool = self._pool.layers[call.layer]
        self._check(call, query, key, value)
        query, key, value = dense(query), dense(key), dense(value)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        asked = NativeCall(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            out=out.data_ptr(),
            pool=pool.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            slot_mapping=self._slot_mapping.data_ptr(),
            spans=self._spans.data_ptr(),
            tables=self._tables.data_ptr(),
            query_strides=query.stride()[:2],
            key_strides=key.stride()[:2],
            value_strides=value.stride()[:2],
            num_rows=len(self._slot_mapping),
            num_spans=len(self._spans),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[2],
            block_size=self._pool.shape.block_size,
            window=call.sliding_window or 0,
            threads=torch.get_num_threads(),
            run_team=self._operator.run_team,
            scaling=call.scaling,
            softcap=call.softcap or 0.0,
        )
        self._operator.forward(pool.dtype, asked)
        return out

    def _check(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """The operator gets pointers alone, and would read and write past what is there."""
        made_for, rows = self._pool.shape, len(self._slot_mapping)
        spec, dtype = made_for.layers[call.layer], made_for.dtype
        if call.sinks is not None and call.sinks.shape != (spec.num_heads,):
            raise UnsupportedModel(f"{spec.num_heads} heads have sinks of the shape {list(call.sinks.shape)}")
        for name, tensor, shape in (
            ("queries", query, (rows, spec.num_heads, spec.head_dim)),
            ("keys", key, (rows, spec.num_kv_heads, spec.head_dim)),
            ("values", value, (rows, spec.num_kv_heads, spec.value_dim)),
        ):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise UnsupportedModel(
                    f"layer {call.layer} has {name} of {tensor.dtype} {list(tensor.shape)}, "
                    f"not of {dtype} {list(shape)}"
                )


def _spans(batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch's sequences as the operator reads them, those with most to compute first.

    Returns spans [sequences, 4]: first row, number of rows, position of the first, where its table begins;
    and all tables, one after the other.
    """
    begins = 0
    chunks = []
    for chunk in batch.chunks:
        chunks.append([chunk.first_row, chunk.num_rows, chunk.start, begins])
        begins += len(chunk.table)
    num_singles, width = batch.decode_tables.shape
    singles = torch.empty(num_singles, 4, dtype=torch.int64)
    singles[:, 0] = batch.decode_rows
    singles[:, 1] = 1
    singles[:, 2] = batch.decode_lengths - 1
    singles[:, 3] = begins + width * torch.arange(num_singles)
    spans = torch.cat([torch.tensor(chunks, dtype=torch.int64).view(-1, 4), singles])
    tables = torch.cat([*(chunk.table for chunk in batch.chunks), batch.decode_tables.flatten()])
    return spans, tables
