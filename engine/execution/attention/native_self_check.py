"""A trial of the compiled operator on this machine, against attention in torch, in every dtype that it has.

Law: what a compiler made wrongly is not used. The trial of a model runs in float32 alone and may not have
every feature; this one has them all, in milliseconds.
"""

from collections.abc import Iterator

import torch

from engine.execution.attention.interface import AttentionBatch, Chunk, LayerCall, LayerSpec, PoolShape
from engine.execution.attention.native_backend import NativeAttention
from engine.execution.attention.native_operator import AttentionOperator
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.machine.native_build import CannotBuild

LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of numbers of about size one; sound ones differ by 1e-6, and by the rounding of bfloat16."""

BLOCK_SIZE = 16
STEPS = ((0, 70), (70, 97), (97, 98))
"""From which token to which, of one sequence."""
SPECS = (
    LayerSpec(6, 2, 24, 40, 0.3),
    LayerSpec(6, 2, 24, 40, 0.3, sliding_window=33, softcap=2.0, sinks=True),
)


def check_operator(operator: AttentionOperator) -> None:
    """Raise `CannotBuild` unless both ways agree."""
    for dtype, most in LARGEST_DIFFERENCE.items():
        for difference in _differences(operator, dtype):
            # NaN is not within the bound either.
            if not difference <= most:
                raise CannotBuild(
                    f"what was compiled disagrees with torch by {difference:.2g} in {dtype} on this machine"
                )


def _differences(operator: AttentionOperator, dtype: torch.dtype) -> Iterator[float]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_tokens = STEPS[-1][1]
    num_blocks = 1 + -(-num_tokens // BLOCK_SIZE)
    shape = PoolShape(SPECS, num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"))
    backends = (NativeAttention(operator, shape), TorchAttention(shape))
    table = torch.arange(num_blocks - 1, 0, -1)
    for start, end in STEPS:
        steps = [backend.build_metadata(_batch(table, start, end)) for backend in backends]
        for layer, spec in enumerate(SPECS):
            sinks = noise(spec.num_heads) if spec.sinks else None
            call = LayerCall(layer, spec.scaling, spec.sliding_window, spec.softcap, sinks)
            rows = (
                noise(end - start, spec.num_heads, spec.head_dim),
                noise(end - start, spec.num_kv_heads, spec.head_dim),
                noise(end - start, spec.num_kv_heads, spec.value_dim),
            )
            ours, theirs = (step.forward(call, *rows) for step in steps)
            yield float((ours - theirs).abs().max())


def _batch(table: torch.Tensor, start: int, end: int) -> AttentionBatch:
    """Tokens `start` to `end` of the sequence in the blocks `table`."""
    positions = torch.arange(start, end)
    table = table[: -(-end // BLOCK_SIZE)]
    is_single = end - start == 1
    return AttentionBatch(
        slot_mapping=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        blocks_begun=table[-(-start // BLOCK_SIZE) :][-1:],
        decode_rows=torch.zeros(int(is_single), dtype=torch.int64),
        decode_lengths=torch.full((int(is_single),), end),
        decode_tables=table.expand(int(is_single), -1),
        chunks=() if is_single else (Chunk(0, end - start, start, table),),
    )
