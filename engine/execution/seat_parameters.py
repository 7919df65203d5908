"""What requests ask of their draws, as arrays: written down once for each seat, read for whole batches.

Law: a row's parameters are those of the sequence that sits there, whoever sat there before. Knows no logits.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.execution.gumbel import seed_states
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

HIGHEST_TEMPERATURE = 1e30
"""All tokens are equally likely long before; more would be infinite in float32."""
_NO_LOGPROBS = -1


class RowParameters(NamedTuple):
    """The parameters of many sequences, each an array [rows].

    `top_k`: 0 is off. `seed_states`: see `engine/execution/gumbel.py`. `num_logprobs`: -1 if there are to be
    none. `may_be_edited`: it may at some time ask for penalties, bias or masks.
    """

    is_random: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed_states: npt.NDArray[np.uint64]
    num_logprobs: npt.NDArray[np.int64]
    may_be_edited: npt.NDArray[np.bool_]

    def of(self, rows: Any) -> "RowParameters":
        """Those of some rows, by an index or a slice."""
        return RowParameters(*(array[rows] for array in self.arrays))

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self

    @property
    def wants_logprobs(self) -> npt.NDArray[np.bool_]:
        wants: npt.NDArray[np.bool_] = self.num_logprobs != _NO_LOGPROBS
        return wants


class SeatParameters:
    """The parameters of those who sit, a row for each seat; there may be any number of seats."""

    def __init__(self) -> None:
        self._owners: list[Sequence | None] = []
        self._table = _nobody()

    def of(self, sequences: list[Sequence]) -> RowParameters:
        """In their order. Raises ValueError if one has no seat."""
        seats = [_seat_of(sequence) for sequence in sequences]
        if max(seats, default=-1) >= len(self._owners):
            self._grow(max(seats) + 1)
        # Compared by identity, in one go: who sits there has mostly sat there before.
        if [self._owners[seat] for seat in seats] != sequences:
            for sequence, seat in zip(sequences, seats, strict=True):
                if self._owners[seat] is not sequence:
                    self._enter(sequence, seat)
        return self._table.of(seats)

    def _grow(self, num_seats: int) -> None:
        num_new = max(num_seats, 2 * len(self._owners)) - len(self._owners)
        self._owners += [None] * num_new
        self._table = RowParameters(*(np.pad(array, (0, num_new)) for array in self._table.arrays))

    def _enter(self, sequence: Sequence, seat: int) -> None:
        params = sequence.params
        self._owners[seat] = sequence
        values = (
            not params.is_greedy,
            min(params.temperature, HIGHEST_TEMPERATURE),
            min(params.top_k, np.iinfo(np.int64).max),
            params.top_p,
            params.min_p,
            seed_states([params.seed])[0],
            _NO_LOGPROBS if params.logprobs is None else params.logprobs,
            may_be_edited(sequence),
        )
        for array, value in zip(self._table.arrays, values, strict=True):
            array[seat] = value


def _seat_of(sequence: Sequence) -> int:
    if sequence.seat is None:
        raise ValueError(f"{sequence.request_id} was to be sampled without a seat")
    return sequence.seat


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


def _nobody() -> RowParameters:
    """Of no rows, in the types that tensors are made of."""
    return RowParameters(
        is_random=np.empty(0, dtype=np.bool_),
        temperature=np.empty(0, dtype=np.float32),
        top_k=np.empty(0, dtype=np.int64),
        top_p=np.empty(0, dtype=np.float64),
        min_p=np.empty(0, dtype=np.float64),
        seed_states=np.empty(0, dtype=np.uint64),
        num_logprobs=np.empty(0, dtype=np.int64),
        may_be_edited=np.empty(0, dtype=np.bool_),
    )
