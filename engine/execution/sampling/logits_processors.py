"""Applies penalties, then bias, then masks to the logits of the rows that need any of them.

Other rows are not copied. State of a sequence is kept by its slot and can be rebuilt from the sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.logit_masks import FilledMasks, RowMasks
from engine.execution.sampling.penalties import Bias, TokenCounts, add_bias, penalize
from engine.execution.sampling.slot_params import Integers
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ProcessedLogits:
    """Processed copies `logits` [processed rows, vocabulary] of `rows`; `faults`: errors by row of the batch.

    `host_rows`: `rows`, ascending, on the host.
    """

    rows: torch.Tensor
    host_rows: Integers
    logits: torch.Tensor
    faults: dict[int, str]


class LogitsProcessors:
    """Processes the logits of a batch; keeps counts and masks of the sequences in its slots."""

    def __init__(self) -> None:
        self._states: dict[int | None, _State] = {}

    def apply(
        self, logits: torch.Tensor, sequences: list[Sequence], candidates: Iterable[int]
    ) -> ProcessedLogits | None:
        """Process `logits` [rows, vocabulary], float32, into copies; None if no row needs it.

        `candidates`: the rows that may need it, ascending. Grammars fill their masks before the logits are
        used, so that on a GPU this overlaps with the forward pass.
        """
        rows = [row for row in candidates if is_processed(sequences[row])]
        if not rows:
            return None
        states = [self._state_of(sequences[row], logits.shape[1]) for row in rows]
        masks = FilledMasks.of(
            [(at, one.masks) for at, one in enumerate(states) if one.masks], logits.shape[1]
        )
        host_rows = np.array(rows, dtype=np.int64)
        on_device = copy_to_device(torch.from_numpy(host_rows), logits.device)
        processed = logits[on_device] if len(rows) < len(sequences) else logits.clone()
        penalize(processed, [(at, one.repetition, one.counts) for at, one in enumerate(states) if one.counts])
        add_bias(processed, [(at, one.bias) for at, one in enumerate(states) if one.bias])
        masks.apply(processed)
        faults = {rows[at]: fault for at, fault in masks.faults.items()}
        return ProcessedLogits(on_device, host_rows, processed, faults)

    def _state_of(self, sequence: Sequence, vocab_size: int) -> "_State":
        state = self._states.get(sequence.slot)
        # By identity, since another sequence may have taken the slot.
        if state is None or state.sequence is not sequence:
            state = _State(sequence, vocab_size, self._masks_to_share(sequence))
            self._states[sequence.slot] = state
        elif state.counts:
            state.counts.update()
        return state

    def _masks_to_share(self, sequence: Sequence) -> RowMasks | None:
        """Masks of another output of the same request, so that large constant masks are made once."""
        found = (one.masks for one in self._states.values() if one.masks and one.masks.shares(sequence))
        return next(found, None)

    def evict(self) -> None:
        """Drop the state of sequences that left their slots."""
        left = [slot for slot, state in self._states.items() if state.sequence.slot != slot]
        for slot in left:
            del self._states[slot]


class _State:
    """What is kept of one sequence."""

    __slots__ = ("bias", "counts", "masks", "repetition", "sequence")

    def __init__(self, sequence: Sequence, vocab_size: int, shared: RowMasks | None) -> None:
        self.sequence = sequence
        self.repetition = sequence.params.repetition_penalty
        self.counts = TokenCounts(sequence, vocab_size) if sequence.params.is_penalized else None
        self.bias = Bias(sequence, vocab_size) if sequence.params.logit_bias else None
        self.masks = RowMasks(sequence, vocab_size, shared) if _is_masked(sequence) else None


def is_processed(sequence: Sequence) -> bool:
    """Whether its next logits need penalties, bias or masks."""
    params = sequence.params
    return params.is_penalized or bool(params.logit_bias) or _is_masked(sequence)


def _is_masked(sequence: Sequence) -> bool:
    params, constraints = sequence.params, sequence.constraints
    return bool(
        constraints.grammar is not None
        or constraints.bad_token_ids
        or params.allowed_token_ids is not None
        or params.min_tokens > sequence.num_output_tokens
    )
