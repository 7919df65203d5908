"""Paged attention on a CPU by the native operator, which reads keys and values in place, once.

Beyond the guarantees of every backend, the bits of a row depend on its sequence and position alone: not on
the batch, the chunks or the number of threads. The operator reads only slots that the sequence has written,
so no block is zeroed when it is begun. `native/pool.h` describes the pool.
"""

import ctypes
from dataclasses import dataclass

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import (
    AttentionBatch,
    DecodeRows,
    LayerCall,
    LayerSpec,
    PoolShape,
    unsupported_shape,
)
from engine.execution.machine.memory import ALIGNMENT, PAGE, dense, huge_page_zeros
from engine.execution.machine.native_library import (
    DTYPES,
    FLOAT,
    INT64,
    POINTER,
    NativeLibrary,
    fields,
)

GROUP = 16
"""Tokens of a group in the KV pool."""
MAX_HEAD_DIM = 512


class NativeCall(ctypes.Structure):
    """`TokenmillCall` of `native/attention.cpp`, field by field."""

    _fields_ = (
        *fields(POINTER, "query key value out pool sinks slot_mapping spans tables"),
        *fields(INT64 * 2, "query_strides key_strides value_strides"),
        *fields(INT64, "num_rows num_spans num_heads num_kv_heads head_dim value_dim block_size"),
        *fields(INT64, "window threads"),
        *fields(POINTER, "run_team"),
        *fields(FLOAT, "scaling softcap"),
    )


class AttentionOperator:
    """The functions of `native/attention.cpp`, which check nothing. Raises `CannotBuild` if missing."""

    def __init__(self, library: NativeLibrary) -> None:
        self._attend = library.by_dtype("tokenmill_attend", [ctypes.POINTER(NativeCall)], ctypes.c_int)
        self._zero = library.by_dtype("tokenmill_zero", [POINTER, POINTER, *[INT64] * 4])
        self._group_numel = library.function("tokenmill_group_numel", [INT64] * 3, INT64)
        self.run_team = library.run_team

    def forward(self, dtype: torch.dtype, call: NativeCall) -> None:
        if self._attend[dtype](ctypes.byref(call)) != 0:
            raise MemoryError("the native attention could not allocate memory")

    def zero(self, pool: torch.Tensor, slot_mapping: torch.Tensor, spec: LayerSpec) -> None:
        """Zero the slots `slot_mapping` (int64) of a layer's pool."""
        sizes = (len(slot_mapping), spec.num_kv_heads, spec.head_dim, spec.value_dim)
        self._zero[pool.dtype](pool.data_ptr(), slot_mapping.data_ptr(), *sizes)

    def group_numel(self, spec: LayerSpec) -> int:
        """Elements of `GROUP` tokens in a layer's pool."""
        return int(self._group_numel(spec.num_kv_heads, spec.head_dim, spec.value_dim))


@dataclass(frozen=True, slots=True)
class NativePool:
    """One tensor per layer: `AttentionOperator.group_numel` elements for each group of `GROUP` slots."""

    shape: PoolShape
    layers: tuple[torch.Tensor, ...]


class NativeAttention:
    """A KV pool of `shape`, and attention over it. Raises `UnsupportedModel` for unsupported shapes."""

    def __init__(self, operator: AttentionOperator, shape: PoolShape) -> None:
        reason = unsupported_shape(shape, dtypes=DTYPES, max_head_dim=MAX_HEAD_DIM)
        if shape.device.type != "cpu":
            reason = f"the device {shape.device}"
        if reason:
            raise UnsupportedModel(f"the native attention does not support {reason}")
        self._operator = operator
        num_groups = -(-shape.num_blocks * shape.block_size // GROUP)
        # The layers have different offsets, so that no step is the first to touch a page in all layers.
        spacing = PAGE // ALIGNMENT // max(1, len(shape.layers)) * ALIGNMENT
        layers = (
            huge_page_zeros(num_groups * operator.group_numel(spec), shape.dtype, offset=index * spacing)
            for index, spec in enumerate(shape.layers)
        )
        self.pool = NativePool(shape, tuple(layers))
        self.zero_blocks((0,))

    def build_metadata(self, batch: AttentionBatch) -> "NativeMetadata":
        return NativeMetadata(self._operator, self.pool, batch.slot_mapping.contiguous(), *_spans(batch))

    def build_decode_metadata(self, rows: DecodeRows) -> "NativeMetadata":
        indices = torch.arange(len(rows.slot_mapping))
        ones = torch.ones_like(indices)
        spans = torch.stack([indices, ones, rows.lengths - 1, indices * rows.tables.stride(0)], dim=1)
        return NativeMetadata(self._operator, self.pool, rows.slot_mapping, spans, rows.tables)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        block_size = self.pool.shape.block_size
        slot_mapping = (torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)).flatten()
        for spec, layer in zip(self.pool.shape.layers, self.pool.layers, strict=True):
            self._operator.zero(layer, slot_mapping, spec)


def bytes_per_block(
    operator: AttentionOperator, specs: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block in all layers together."""
    return -(-block_size * dtype.itemsize * sum(map(operator.group_numel, specs)) // GROUP)


class NativeMetadata:
    """One forward pass. `spans`, `tables`: see `_spans`."""

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
        """See `AttentionMetadata`. Raises `UnsupportedModel` for tensors that do not match the pool."""
        pool = self._pool.layers[call.layer]
        self._check(call, query, key, value)
        query, key, value = dense(query), dense(key), dense(value)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        arguments = NativeCall(
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
        self._operator.forward(pool.dtype, arguments)
        return out

    def _check(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """The operator receives pointers only and would read and write out of bounds."""
        shape, rows = self._pool.shape, len(self._slot_mapping)
        spec, dtype = shape.layers[call.layer], shape.dtype
        if call.sinks is not None and call.sinks.shape != (spec.num_heads,):
            raise UnsupportedModel(f"{spec.num_heads} heads have sinks of the shape {list(call.sinks.shape)}")
        for name, tensor, sizes in (
            ("queries", query, (rows, spec.num_heads, spec.head_dim)),
            ("keys", key, (rows, spec.num_kv_heads, spec.head_dim)),
            ("values", value, (rows, spec.num_kv_heads, spec.value_dim)),
        ):
            if tensor.shape != sizes or tensor.dtype != dtype:
                raise UnsupportedModel(
                    f"layer {call.layer} has {name} of {tensor.dtype} {list(tensor.shape)}, "
                    f"not of {dtype} {list(sizes)}"
                )


def _spans(batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of a batch in the operator's format, chunks first, as they take longest.

    Returns spans [sequences, 4]: first row, number of rows, position of the first row, offset of its table;
    and all tables, concatenated.
    """
    offset = 0
    chunks = []
    for chunk in batch.chunks:
        chunks.append([chunk.first_row, chunk.num_rows, chunk.start, offset])
        offset += len(chunk.table)
    num_decodes, width = batch.decode_tables.shape
    decodes = torch.empty(num_decodes, 4, dtype=torch.int64)
    decodes[:, 0] = batch.decode_rows
    decodes[:, 1] = 1
    decodes[:, 2] = batch.decode_lengths - 1
    decodes[:, 3] = offset + width * torch.arange(num_decodes)
    spans = torch.cat([torch.tensor(chunks, dtype=torch.int64).view(-1, 4), decodes])
    tables = torch.cat([*(chunk.table for chunk in batch.chunks), batch.decode_tables.flatten()])
    return spans, tables
