"""Chooses the next token of each row: a pure function of the row and of its sequence's tokens and parameters.

Law: a row's token depends on nothing else: not on the other rows, not on any generator's state. The order is
penalties and bias, masks, then the draw. This file does not know sequences' states, stops or texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.constraints import NO_TOKEN_ALLOWED
from engine.execution.machine.async_copy import SampledIds, copy_to_device
from engine.execution.machine.device_errors import device_errors
from engine.execution.sampling.draw import Draws, draw, take
from engine.execution.sampling.logits_processors import Edited, LogitEdits
from engine.execution.sampling.logprobs import token_logprobs
from engine.execution.sampling.native_draw import UNDECIDED, DrawOperator, ask, row_addresses
from engine.execution.sampling.slot_params import NO_LOGPROBS, Numbers, Rows, SlotParams
from engine.execution.sampling.top_k import first_largest
from engine.outputs import SampledToken, ScheduledSequence, TokenLogprobs
from engine.sequence import Sequence

NON_FINITE = "the model computed non-finite logits"
ROWS_AT_ONCE = 32
"""On a CPU, so that what is made of them stays in its cache, and a large batch takes no more memory."""
_ERRORS = {-1: NON_FINITE, -2: NO_TOKEN_ALLOWED}


class Sampler:
    """Chooses for a whole batch at once. What it remembers of a sequence can be made again from it."""

    def __init__(self, operator: DrawOperator | None = None) -> None:
        """Draws by the native `operator`, if there is one and the logits are on a CPU."""
        self._operator = operator
        self._params = SlotParams()
        self._edits = LogitEdits()

    def sample(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        """One token for each item that samples, in order; `logits` stay as they are.

        `logits` [wanted rows of all items, vocabulary], any float dtype. A row that has NaN or +inf, or
        nothing but -inf, gives an error and no token; so does one whose masks leave nothing, and one whose
        grammar fails. Raises `DeviceLost`.
        """
        with device_errors(), torch.inference_mode():
            self._edits.forget_those_who_left()
            sampled: list[SampledToken] = []
            for part, sequences, params in self._parts(logits, items):
                sampled += self._sample(part, sequences, params)
        return sampled

    def draw(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> SampledIds:
        """The tokens of `sample`, on their way, for items that want neither edits nor log-probabilities.

        Raises `DeviceLost`.
        """
        with device_errors(), torch.inference_mode():
            tokens = [
                self._choose(part, None, sequences, params)
                for part, sequences, params in self._parts(logits, items)
            ]
            nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
            return SampledIds.of(tokens[0] if len(tokens) == 1 else torch.cat([nothing, *tokens]))

    def fetch(self, drawn: SampledIds) -> list[SampledToken]:
        """Wait for what was drawn: what `sample` gives. Raises `DeviceLost`."""
        with device_errors():
            return [
                SampledToken(token_id) if token_id >= 0 else SampledToken(None, _ERRORS[token_id])
                for token_id in drawn.on_host()
            ]

    def _parts(
        self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]
    ) -> Iterator[tuple[torch.Tensor, list[Sequence], Rows]]:
        """The rows that are sampled from, float32, with their sequences, as many as are sampled at once."""
        rows, sequences = _sampling_rows(items)
        if len(rows) < len(logits):
            logits = logits[copy_to_device(torch.tensor(rows, dtype=torch.int64), logits.device)]
        params = self._params.of(sequences)
        step = ROWS_AT_ONCE if logits.device.type == "cpu" else max(len(rows), 1)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            yield logits[part].float().contiguous(), sequences[part], params[part]

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence], params: Rows) -> list[SampledToken]:
        edited = self._edits.apply(logits, sequences, np.flatnonzero(params["may_be_edited"]).tolist())
        token_ids = self._choose(logits, edited, sequences, params).tolist()
        logprobs = _sampled_logprobs(logits, token_ids, params)
        faults = edited.faults if edited else {}
        if not faults and not logprobs and min(token_ids) >= 0:
            return list(map(SampledToken, token_ids))
        return [
            SampledToken(token_id, None, logprobs.get(row))
            if token_id >= 0 and row not in faults
            else SampledToken(None, faults.get(row) or _ERRORS[token_id])
            for row, token_id in enumerate(token_ids)
        ]

    def _choose(
        self, logits: torch.Tensor, edited: Edited | None, sequences: list[Sequence], params: Rows
    ) -> torch.Tensor:
        """The token of each row, or the key of its error, on the device of the logits."""
        operator = self._operator if logits.device.type == "cpu" else None
        find_largest = operator.first_largest if operator else first_largest
        largest, tokens = find_largest(logits)
        # The largest of a row with NaN is NaN. Of the model's own row: a mask's -inf is no fault.
        is_finite = largest.isfinite()
        if edited:
            largest[edited.rows], tokens[edited.rows] = find_largest(edited.logits)
        random = np.flatnonzero(params["is_random"])
        if len(random):
            indices = np.array([sequences[row].num_output_tokens for row in random], dtype=np.int64)
            batch = _Batch(logits, edited, largest, tokens, params)
            undecided = batch.draw_by(operator, random, indices) if operator else np.arange(len(random))
            if len(undecided):
                batch.draw(random[undecided], indices[undecided])
        return tokens.masked_fill_(largest == -torch.inf, -2).masked_fill_(~is_finite, -1)

    def prompt_logprobs(
        self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        """Log-probabilities of the prompt tokens behind the wanted rows of each item that asks for them.

        `logits` as in `sample`. A chunk's row j is about token `start + j + 1`, if that is in the prompt.
        Raises `DeviceLost`.
        """
        found: list[tuple[ScheduledSequence, list[TokenLogprobs]]] = []
        end = 0
        with device_errors(), torch.inference_mode():
            for item in items:
                begin, end = end, end + item.num_new_tokens - item.logits_from
                number = item.sequence.params.prompt_logprobs
                first = item.start + item.logits_from + 1
                last = min(first + end - begin, item.sequence.num_prompt_tokens)
                if number is not None and first < last:
                    token_ids = item.sequence.token_ids[first:last]
                    rows = logits[begin : begin + len(token_ids)]
                    found.append((item, token_logprobs(rows, token_ids, [number] * len(token_ids))))
        return found


def _sampling_rows(items: tuple[ScheduledSequence, ...]) -> tuple[list[int], list[Sequence]]:
    """The last wanted row of each item that samples, and its sequence."""
    rows: list[int] = []
    sequences: list[Sequence] = []
    end = 0
    for item in items:
        end += item.num_new_tokens - item.logits_from
        if item.samples:
            rows.append(end - 1)
            sequences.append(item.sequence)
    return rows, sequences


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows with their `largest` logits after `edited`; a draw puts the `tokens` of some of them in place."""

    logits: torch.Tensor
    edited: Edited | None
    largest: torch.Tensor
    tokens: torch.Tensor
    params: Rows

    def draw_by(self, operator: DrawOperator, rows: Numbers, indices: Numbers) -> Numbers:
        """Draw `rows`, whose outputs have `indices` tokens; returns which of them are yet undecided."""
        addresses = row_addresses(self.logits)
        if self.edited:
            addresses[self.edited.row_numbers] = row_addresses(self.edited.logits)
        largest, likeliest = self.largest.numpy()[rows], self.tokens.numpy()[rows]
        vocab_size = self.logits.shape[1]
        asked = ask(addresses[rows], largest, likeliest, self.params[rows], indices, vocab_size)
        drawn = operator.draw(asked, vocab_size)
        self.tokens.numpy()[rows] = drawn
        return np.flatnonzero(drawn == UNDECIDED)

    def draw(self, rows: Numbers, indices: Numbers) -> None:
        """The same by torch, whatever the device."""
        device = self.logits.device
        draws = Draws.of(self.params[rows], indices, self.logits.shape[1], device)
        on_device = copy_to_device(torch.from_numpy(rows), device)
        shifted = self._shifted(rows, on_device)
        self.tokens[on_device] = draw(shifted.div_(draws.temperature[:, None]), draws)

    def _shifted(self, rows: Numbers, on_device: torch.Tensor) -> torch.Tensor:
        """The edited logits of `rows`, ascending, in a tensor of their own, each row's largest at 0.

        `on_device`: the same rows, where the logits are. Rows are shifted before they are divided: the draw
        is the same, and nothing overflows at a small temperature.
        """
        logits, edited = self.logits, self.edited
        if edited and len(edited.rows) == len(logits):
            logits, edited = edited.logits, None
        shifted = take(logits, on_device) - self.largest[on_device, None]
        if edited:
            at = np.flatnonzero(np.isin(edited.row_numbers, rows))
            changed = edited.row_numbers[at]
            places, at_there, changed_there = (
                copy_to_device(torch.from_numpy(one), logits.device)
                for one in (np.searchsorted(rows, changed), at, changed)
            )
            shifted[places] = edited.logits[at_there] - self.largest[changed_there, None]
        return shifted


def _sampled_logprobs(logits: torch.Tensor, token_ids: list[int], params: Rows) -> dict[int, TokenLogprobs]:
    """By row, for those that ask for them and have a token."""
    asking = np.flatnonzero((params["num_logprobs"] != NO_LOGPROBS) & (np.array(token_ids) >= 0))
    if not len(asking):
        return {}
    rows = copy_to_device(torch.from_numpy(asking), logits.device)
    asked = asking.tolist()
    chosen = [token_ids[row] for row in asked]
    numbers = params["num_logprobs"][asking].tolist()
    return dict(zip(asked, token_logprobs(take(logits, rows), chosen, numbers), strict=True))
