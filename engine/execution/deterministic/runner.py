"""Runs decisions in forward passes of a few fixed row counts, so that a batch cannot change the bits of a
row.

Every forward pass, and its last linear layer, is padded to one of `row_counts` rows, which `self_check.py`
found to give the same bits. A larger step is split into several forward passes. Splitting and padding change
no bits and are chosen for speed.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from engine.execution.attention.interface import AttentionBackend
from engine.execution.machine.device_errors import device_errors
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.runner.synthetic_steps import null_inputs
from engine.outputs import ScheduledSequence, SchedulerOutputs

MAX_PADDING = 3
"""At most 1 / `MAX_PADDING` of a forward pass is padding, if a smaller one could be full."""
WEIGHT_BOUND_ROWS = 32
"""Up to this size, padding costs less than another forward pass: linear layers of SmolLM2 took 0.8 ms for 4
rows, 1.2 for 16 and 1.5 for 32 (float32, one core with AVX2)."""


class DeterministicRunner:
    """A `ModelRunner` whose forward passes have one of `row_counts` rows, ascending."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        inputs: InputBuilder,
        row_counts: tuple[int, ...],
    ) -> None:
        self._runner = ModelRunner(model, backend, inputs)
        self._backend = backend
        self._inputs = inputs
        self._row_counts = row_counts

    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        with device_errors(), torch.inference_mode():
            if outputs.blocks_to_zero:
                self._backend.zero_blocks(outputs.blocks_to_zero)
            parts = list(split(outputs, self._row_counts))
            return torch.cat([self._forward(self._inputs.build(part, drawn)) for part in parts])

    def check(self) -> None:
        """See `ModelRunner.check`."""
        with device_errors(), torch.inference_mode():
            self._forward(null_inputs())
            self._backend.zero_blocks((0,))

    def release_memory(self) -> bool:
        """See `ModelRunner.release_memory`."""
        return self._runner.release_memory()

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        padded = pad_inputs(inputs, self._row_counts)
        logits = self._runner.forward(padded)
        wanted = inputs.logits_rows
        if len(padded.logits_rows) == len(padded.token_ids):
            # All rows, in order.
            return logits[wanted.to(logits.device)]
        return logits[: len(wanted)]


def split(outputs: SchedulerOutputs, row_counts: tuple[int, ...]) -> Iterator[SchedulerOutputs]:
    """The decision as one decision per forward pass, in the order of its rows."""
    left = sum(item.num_new_tokens for item in outputs.scheduled)
    free = next_size(left, row_counts)
    released_slots = outputs.released_slots
    parts: list[ScheduledSequence] = []
    for item in outputs.scheduled:
        offset = 0
        while offset < item.num_new_tokens:
            count = min(free, item.num_new_tokens - offset)
            parts.append(_part(item, offset, count))
            offset, free, left = offset + count, free - count, left - count
            if not free or not left:
                yield SchedulerOutputs(prefill=tuple(parts), released_slots=released_slots)
                parts, released_slots = [], ()
                free = next_size(left, row_counts)


def next_size(num_rows: int, row_counts: tuple[int, ...]) -> int:
    """The row count of the next forward pass, with `num_rows` left to compute."""
    full = max((count for count in row_counts if count <= num_rows), default=0)
    enough = min((count for count in row_counts if count >= num_rows), default=0)
    if not full or not enough:
        return full or enough
    is_cheap = enough <= WEIGHT_BOUND_ROWS or (enough - num_rows) * MAX_PADDING <= enough
    return enough if is_cheap else full


def pad_inputs(inputs: StepInputs, row_counts: tuple[int, ...]) -> StepInputs:
    """The forward pass with padding rows at its end, and with unused logits."""
    num_rows, num_wanted = len(inputs.token_ids), len(inputs.logits_rows)
    size = min(count for count in row_counts if count >= num_rows)
    rows = inputs.logits_rows
    if num_wanted:
        num_logits = min(count for count in row_counts if count >= num_wanted)
        # All rows in order, which is what a model without `logits_to_keep` computes.
        rows = torch.arange(size) if num_logits == size else pad(rows, (0, num_logits - num_wanted))
    return replace(
        inputs,
        token_ids=pad(inputs.token_ids, (0, size - num_rows)),
        positions=pad(inputs.positions, (0, size - num_rows)),
        logits_rows=rows,
    )


def _part(item: ScheduledSequence, offset: int, count: int) -> ScheduledSequence:
    """`count` tokens of the item from its token `offset` on, with their wanted rows."""
    return ScheduledSequence(
        sequence=item.sequence,
        start=item.start + offset,
        num_new_tokens=count,
        logits_from=min(max(item.logits_from - offset, 0), count),
        samples=item.samples and offset + count == item.num_new_tokens,
    )
