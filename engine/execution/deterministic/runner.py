"""Runs decisions in forwards of a few fixed sizes, so that what stands beside a row cannot change its bits.

Law: every forward has one of `row_counts` rows, filled up with rows of nobody, and so has its last linear
layer; every operator of the model then sees one of a few shapes, all of which `deterministic_trial.py` found
to agree. A step of more rows is computed as several forwards, one after the other. How a step is cut and
filled up changes no bit, so it follows speed alone. This file does not know models or attention.
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

MOST_FILL = 3
"""A forward is not filled up by more than one part in so many, if a smaller one could be full."""
WEIGHT_BOUND_ROWS = 32
"""Up to here filling a forward up costs less than another one: linear layers of SmolLM2 took 0.8 ms for 4
rows, 1.2 for 16 and 1.5 for 32 (float32, one core with AVX2)."""


class DeterministicRunner:
    """A `ModelRunner` that is only ever given `row_counts` rows (ascending) at once."""

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
        filled = fill_up(inputs, self._row_counts)
        logits = self._runner.forward(filled)
        wanted = inputs.logits_rows
        if len(filled.logits_rows) == len(filled.token_ids):
            # All rows, in their order.
            return logits[wanted.to(logits.device)]
        return logits[: len(wanted)]


def split(outputs: SchedulerOutputs, row_counts: tuple[int, ...]) -> Iterator[SchedulerOutputs]:
    """The same decision as several, one for each forward, in the order of its rows."""
    left = sum(item.num_new_tokens for item in outputs.scheduled)
    room = next_size(left, row_counts)
    released_slots = outputs.released_slots
    taken: list[ScheduledSequence] = []
    for item in outputs.scheduled:
        begun = 0
        while begun < item.num_new_tokens:
            count = min(room, item.num_new_tokens - begun)
            taken.append(_part(item, begun, count))
            begun, room, left = begun + count, room - count, left - count
            if not room or not left:
                yield SchedulerOutputs(prefill=tuple(taken), released_slots=released_slots)
                taken, released_slots = [], ()
                room = next_size(left, row_counts)


def next_size(num_rows: int, row_counts: tuple[int, ...]) -> int:
    """How many rows the next forward has, where `num_rows` are left to compute."""
    full = max((count for count in row_counts if count <= num_rows), default=0)
    enough = min((count for count in row_counts if count >= num_rows), default=0)
    if not full or not enough:
        return full or enough
    is_cheap = enough <= WEIGHT_BOUND_ROWS or (enough - num_rows) * MOST_FILL <= enough
    return enough if is_cheap else full


def fill_up(inputs: StepInputs, row_counts: tuple[int, ...]) -> StepInputs:
    """The same forward with rows of nobody at its end, and with logits that nobody wants."""
    num_rows, num_wanted = len(inputs.token_ids), len(inputs.logits_rows)
    size = min(count for count in row_counts if count >= num_rows)
    rows = inputs.logits_rows
    if num_wanted:
        num_logits = min(count for count in row_counts if count >= num_wanted)
        # A model that cannot be told which logits are wanted gives all, in order: then ask for these.
        rows = torch.arange(size) if num_logits == size else pad(rows, (0, num_logits - num_wanted))
    return replace(
        inputs,
        token_ids=pad(inputs.token_ids, (0, size - num_rows)),
        positions=pad(inputs.positions, (0, size - num_rows)),
        logits_rows=rows,
    )


def _part(item: ScheduledSequence, begun: int, count: int) -> ScheduledSequence:
    """`count` tokens of the item from its token `begun` on, with those of its wanted rows."""
    return ScheduledSequence(
        sequence=item.sequence,
        start=item.start + begun,
        num_new_tokens=count,
        logits_from=min(max(item.logits_from - begun, 0), count),
        samples=item.samples and begun + count == item.num_new_tokens,
    )
