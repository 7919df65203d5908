"""Sampling parameters as arrays: one row per slot, written once per sequence, read for whole batches."""

import numpy as np
import numpy.typing as npt

from engine.execution.sampling.gumbel import seed_states
from engine.sequence import Sequence

MAX_TEMPERATURE = 1e30
"""All tokens are equally likely long before. More would be infinite in float32."""
NO_LOGPROBS = -1

PARAMS_DTYPE = np.dtype(
    [
        ("is_random", np.bool_),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed_state", np.uint64),
        ("num_logprobs", np.int64),
        ("may_be_processed", np.bool_),
    ]
)
"""The parameters of a row.

`top_k`: 0 is off. `seed_state`: see `engine/execution/sampling/gumbel.py`. `num_logprobs`: `NO_LOGPROBS` for
none. `may_be_processed`: whether it may need penalties, bias or masks at some step.
"""
Params = npt.NDArray[np.void]
"""An array of `PARAMS_DTYPE`, one element per row."""
Integers = npt.NDArray[np.int64]


class SlotParams:
    """The parameters of the sequences in all slots."""

    def __init__(self) -> None:
        self._owners: list[Sequence | None] = []
        self._table: Params = np.zeros(0, dtype=PARAMS_DTYPE)

    def of(self, sequences: list[Sequence]) -> Params:
        """The rows of `sequences`, in order. Raises ValueError for a sequence without a slot."""
        slots = [_slot_of(sequence) for sequence in sequences]
        if max(slots, default=-1) >= len(self._owners):
            self._grow(max(slots) + 1)
        # One comparison by identity: most sequences were in their slots before.
        if [self._owners[slot] for slot in slots] != sequences:
            for sequence, slot in zip(sequences, slots, strict=True):
                if self._owners[slot] is not sequence:
                    self._write(sequence, slot)
        return self._table[slots]

    def _grow(self, num_slots: int) -> None:
        num_new = max(num_slots, 2 * len(self._owners)) - len(self._owners)
        self._owners += [None] * num_new
        self._table = np.concatenate([self._table, np.zeros(num_new, dtype=PARAMS_DTYPE)])

    def _write(self, sequence: Sequence, slot: int) -> None:
        params = sequence.params
        self._owners[slot] = sequence
        self._table[slot] = (
            not params.is_greedy,
            min(params.temperature, MAX_TEMPERATURE),
            min(params.top_k, np.iinfo(np.int64).max),
            params.top_p,
            params.min_p,
            seed_states([params.seed])[0],
            NO_LOGPROBS if params.logprobs is None else params.logprobs,
            sequence.may_be_processed,
        )


def _slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise ValueError(f"{sequence.request_id} was to be sampled without a slot")
    return sequence.slot
