"""Self-check of the native attention on this machine, against the torch backend.

It covers every dtype and feature in milliseconds; the agreement check of a model runs in float32 only and may
not use every feature.
"""

import torch

from engine.execution.attention.interface import AttentionBatch, Chunk, LayerCall, LayerSpec, PoolShape
from engine.execution.attention.native_backend import AttentionOperator, NativeAttention
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.machine.self_check import check_close, seeded_randn

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Correct results differ by about 1e-6, and by the rounding of bfloat16."""
BLOCK_SIZE = 16
STEPS = ((0, 70), (70, 97), (97, 98))
"""First and last token (exclusive) of each step of one sequence."""
SPECS = (
    LayerSpec(6, 2, 24, 40, 0.3),
    LayerSpec(6, 2, 24, 40, 0.3, sliding_window=33, softcap=2.0, sinks=True),
)


def check_operator(operator: AttentionOperator) -> None:
    """Raise `CannotBuild` unless the operator agrees with torch."""
    for dtype, tolerance in TOLERANCES.items():
        _check_dtype(operator, dtype, tolerance)


def _check_dtype(operator: AttentionOperator, dtype: torch.dtype, tolerance: float) -> None:
    randn = seeded_randn()
    num_blocks = 1 + -(-STEPS[-1][1] // BLOCK_SIZE)
    shape = PoolShape(SPECS, num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"))
    backends = (NativeAttention(operator, shape), TorchAttention(shape))
    table = torch.arange(num_blocks - 1, 0, -1)
    for start, end in STEPS:
        native, reference = (backend.build_metadata(_batch(table, start, end)) for backend in backends)
        for layer, spec in enumerate(SPECS):
            sinks = randn(spec.num_heads, dtype=dtype) if spec.sinks else None
            call = LayerCall(layer, spec.scaling, spec.sliding_window, spec.softcap, sinks)
            sizes = (
                (spec.num_heads, spec.head_dim),
                (spec.num_kv_heads, spec.head_dim),
                (spec.num_kv_heads, spec.value_dim),
            )
            rows = [randn(end - start, *size, dtype=dtype) for size in sizes]
            check_close("attention", native.forward(call, *rows), reference.forward(call, *rows), tolerance)


def _batch(table: torch.Tensor, start: int, end: int) -> AttentionBatch:
    """Tokens `start` to `end` of the sequence in the blocks `table`."""
    positions = torch.arange(start, end)
    table = table[: -(-end // BLOCK_SIZE)]
    num_decodes = int(end - start == 1)
    return AttentionBatch(
        slot_mapping=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        blocks_begun=table[-(-start // BLOCK_SIZE) :][-1:],
        decode_rows=torch.zeros(num_decodes, dtype=torch.int64),
        decode_lengths=torch.full((num_decodes,), end),
        decode_tables=table.expand(num_decodes, -1),
        chunks=() if num_decodes else (Chunk(0, end - start, start, table),),
    )
