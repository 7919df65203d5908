"""What requests ask of their draws, as arrays: written down once for each slot, read for whole batches.

Law: a row's parameters are those of the sequence that sits there, whoever sat there before. Knows no logits.
"""

import numpy as np
import numpy.typing as npt

from engine.execution.sampling.gumbel import seed_states
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

HIGHEST_TEMPERATURE = 1e30
"""All tokens are equally likely long before; more would be infinite in float32."""
NO_LOGPROBS = -1

ROW = np.dtype(
    [
        ("is_random", np.bool_),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed_state", np.uint64),
        ("num_logprobs", np.int64),
        ("may_be_edited", np.bool_),
    ]
)
"""A row's parameters, in the types that tensors are made of.

`top_k`: 0 is off. `seed_state`: see `engine/execution/sampling/gumbel.py`. `num_logprobs`: `NO_LOGPROBS` if
there are to be none. `may_be_edited`: it may at some time ask for penalties, bias or masks.
"""
Rows = npt.NDArray[np.void]
"""Of `ROW`, one for each sequence."""
Numbers = npt.NDArray[np.int64]


class SlotParams:
    """The parameters of those who sit, a row for each slot; there may be any number of slots."""

    def __init__(self) -> None:
        self._owners: list[Sequence | None] = []
        self._table: Rows = np.zeros(0, dtype=ROW)

    def of(self, sequences: list[Sequence]) -> Rows:
        """In their order. Raises ValueError if one has no slot."""
        slots = [_slot_of(sequence) for sequence in sequences]
        if max(slots, default=-1) >= len(self._owners):
            self._grow(max(slots) + 1)
        # Compared by identity, in one go: who sits there has mostly sat there before.
        if [self._owners[slot] for slot in slots] != sequences:
            for sequence, slot in zip(sequences, slots, strict=True):
                if self._owners[slot] is not sequence:
                    self._enter(sequence, slot)
        return self._table[slots]

    def _grow(self, num_slots: int) -> None:
        num_new = max(num_slots, 2 * len(self._owners)) - len(self._owners)
        self._owners += [None] * num_new
        self._table = np.concatenate([self._table, np.zeros(num_new, dtype=ROW)])

    def _enter(self, sequence: Sequence, slot: int) -> None:
        params = sequence.params
        self._owners[slot] = sequence
        self._table[slot] = (
            not params.is_greedy,
            min(params.temperature, HIGHEST_TEMPERATURE),
            min(params.top_k, np.iinfo(np.int64).max),
            params.top_p,
            params.min_p,
            seed_states([params.seed])[0],
            NO_LOGPROBS if params.logprobs is None else params.logprobs,
            may_be_edited(sequence),
        )


def _slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise ValueError(f"{sequence.request_id} was to be sampled without a slot")
    return sequence.slot


def may_be_edited(sequence: Sequence) -> bool:
    """Whether it may at some time ask for anything but the model's own logits."""
    params, constraints = sequence.params, sequence.constraints
    return bool(
        is_penalized(params)
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
        or constraints.grammar is not None
        or constraints.bad_token_ids
    )


def is_penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
