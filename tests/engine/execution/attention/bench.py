"""Steps over sequences whose queries, keys and values are known, for any backend of attention."""

from collections.abc import Callable

import torch

from engine.execution.attention.interface import AttentionBackend, LayerCall, LayerSpec
from engine.execution.runner.inputs import InputBuilder
from engine.outputs import SchedulerOutputs
from engine.sequence import Sequence
from tests.engine.execution.pools import cpu_shape, poisoned
from tests.engine.execution.serving import in_slot, part

LONGEST = 100
SLOTS = 5
# (slot, start, end): chunks with and without context, decode rows, both together; slot 4 is never computed.
STEPS = (
    ((0, 0, 70), (1, 0, 1), (2, 0, 16), (3, 0, 33)),
    ((1, 1, 2), (0, 70, 97), (2, 16, 17), (3, 33, 64)),
    ((0, 97, 98), (1, 2, 3), (2, 17, 18), (3, 64, 65)),
    ((0, 98, 100), (3, 65, 99)),
)
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Outputs = dict[tuple[int, int], torch.Tensor]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Absolute and relative; bfloat16 has 8 bits, and torch rounds the weights to them as well."""


class Bench:
    """Sequences whose queries, keys and values are known, and steps over any backend."""

    def __init__(self, spec: LayerSpec, block_size: int, dtype: torch.dtype, longest: int = LONGEST) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.spec, self.block_size, self.dtype, self.longest = spec, block_size, dtype, longest
        self.tokens: list[Rows] = [
            (
                self.noise(longest, spec.num_heads, spec.head_dim),
                self.noise(longest, spec.num_kv_heads, spec.head_dim),
                self.noise(longest, spec.num_kv_heads, spec.value_dim),
            )
            for _ in range(SLOTS)
        ]
        sinks = self.noise(spec.num_heads) if spec.sinks else None
        self.call = LayerCall(0, spec.scaling, spec.sliding_window, spec.softcap, sinks)
        self.num_blocks = 1 + SLOTS * -(-longest // block_size)
        self.lay_out: Callable[[Rows], Rows] = lambda rows: rows

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def backend(self, attention: str) -> AttentionBackend:
        return poisoned(attention, cpu_shape((self.spec,), self.num_blocks, self.block_size, self.dtype))

    def sequences(self) -> list[Sequence]:
        blocks = range(1, self.num_blocks)
        return [in_slot(slot, [0] * self.longest, list(blocks[slot::SLOTS])) for slot in range(SLOTS)]

    def run(self, backend: AttentionBackend, steps: tuple[tuple[tuple[int, int, int], ...], ...]) -> Outputs:
        """Each token's output, [heads, value_dim], by slot and position."""
        sequences, inputs = self.sequences(), InputBuilder(SLOTS, self.longest, self.block_size)
        found: Outputs = {}
        for step in steps:
            items = tuple(part(sequences[who], start, end) for who, start, end in step)
            batch = inputs.build(SchedulerOutputs(prefill=items)).batch
            query, key, value = (
                torch.cat([self.tokens[who][i][start:end] for who, start, end in step]) for i in range(3)
            )
            out = backend.build_metadata(batch).forward(self.call, *self.lay_out((query, key, value)))
            assert out.dtype == self.dtype
            places = [(who, at) for who, start, end in step for at in range(start, end)]
            found |= dict(zip(places, out, strict=True))
        return found


BITS = LayerSpec(6, 2, 32, 48, 0.2, sinks=True)
