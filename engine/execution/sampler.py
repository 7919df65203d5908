"""Chooses the next token of each row: a pure function of the row and of its sequence's tokens and parameters.

Law: a row's token depends on nothing else: not on the other rows, not on any generator's state. The order is
penalties and bias, masks, then the draw. This file does not know sequences' states, stops or texts.
"""

import numpy as np
import torch

from engine.constraints import NO_TOKEN_ALLOWED
from engine.execution.draw import Draws, draw, take
from engine.execution.edits import Edited, LogitEdits
from engine.execution.faults import device_faults
from engine.execution.largest import first_largest
from engine.execution.logprobs import token_logprobs
from engine.execution.searches import TORCH, Searches
from engine.execution.seat_parameters import NO_LOGPROBS, Rows, SeatParameters
from engine.outputs import SampledToken, ScheduledSequence, TokenLogprobs
from engine.sequence import Sequence

NON_FINITE = "the model computed non-finite logits"
ROWS_AT_ONCE = 32
"""On a CPU, so that what is made of them stays in its cache, and a large batch takes no more memory."""
_ERRORS = {-1: NON_FINITE, -2: NO_TOKEN_ALLOWED}


class Sampler:
    """Chooses for a whole batch at once. What it remembers of a sequence can be made again from it."""

    def __init__(self, searches: Searches = TORCH) -> None:
        self._searches = searches
        self._params = SeatParameters()
        self._edits = LogitEdits()

    def sample(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        """One token for each item that samples, in order; `logits` stay as they are.

        `logits` [wanted rows of all items, vocabulary], any float dtype. A row that has NaN or +inf, or
        nothing but -inf, gives an error and no token; so does one whose masks leave nothing, and one whose
        grammar fails. Raises `DeviceLost`.
        """
        rows, sequences = _sampling_rows(items)
        if not rows:
            return []
        with device_faults(), torch.inference_mode():
            if len(rows) < len(logits):
                logits = logits[torch.tensor(rows, device=logits.device)]
            self._edits.forget_those_who_left()
            params = self._params.of(sequences)
            step = ROWS_AT_ONCE if logits.device.type == "cpu" else len(rows)
            sampled: list[SampledToken] = []
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                sampled += self._sample(logits[part].float(), sequences[part], params[part])
        return sampled

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence], params: Rows) -> list[SampledToken]:
        edited = self._edits.apply(logits, sequences, np.flatnonzero(params["may_be_edited"]).tolist())
        random = np.flatnonzero(params["is_random"])
        indices = [sequences[row].num_output_tokens for row in random]
        token_ids = _choose(logits, edited, params, indices, self._searches)
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

    def prompt_logprobs(
        self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        """Log-probabilities of the prompt tokens behind the wanted rows of each item that asks for them.

        `logits` as in `sample`. A chunk's row j is about token `start + j + 1`, if that is in the prompt.
        Raises `DeviceLost`.
        """
        found: list[tuple[ScheduledSequence, list[TokenLogprobs]]] = []
        end = 0
        with device_faults(), torch.inference_mode():
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


def _choose(
    logits: torch.Tensor,
    edited: Edited | None,
    params: Rows,
    indices: list[int],
    searches: Searches,
) -> list[int]:
    """The token of each row, or the key of its error. `indices`: output tokens of those drawn at random."""
    largest, tokens = first_largest(logits)
    # The largest of a row with NaN is NaN. Of the model's own row: a mask's -inf is no fault.
    is_finite = largest.isfinite()
    if edited:
        largest[edited.rows], tokens[edited.rows] = first_largest(edited.logits)
    if indices:
        rows = torch.from_numpy(np.flatnonzero(params["is_random"])).to(logits.device)
        draws = Draws.of(params[params["is_random"]], indices, logits.shape[1], logits.device)
        shifted = _shifted(logits, edited, largest, rows)
        tokens[rows] = draw(shifted.div_(draws.temperature[:, None]), draws, searches)
    tokens.masked_fill_(largest == -torch.inf, -2).masked_fill_(~is_finite, -1)
    return tokens.tolist()


def _shifted(
    logits: torch.Tensor, edited: Edited | None, largest: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The edited logits of `rows`, ascending, in a tensor of their own, each row's largest at 0.

    Shifted before they are divided: the draw is the same, and nothing overflows at a small temperature.
    """
    if edited and len(edited.rows) == len(logits):
        logits, edited = edited.logits, None
    shifted = take(logits, rows) - largest[rows, None]
    if edited:
        is_random = torch.isin(edited.rows, rows)
        changed = edited.rows[is_random]
        places = torch.searchsorted(rows, changed)
        shifted[places] = edited.logits[is_random] - largest[changed, None]
    return shifted


def _sampled_logprobs(logits: torch.Tensor, token_ids: list[int], params: Rows) -> dict[int, TokenLogprobs]:
    """By row, for those that ask for them and have a token."""
    asking = np.flatnonzero((params["num_logprobs"] != NO_LOGPROBS) & (np.array(token_ids) >= 0))
    if not len(asking):
        return {}
    rows = torch.from_numpy(asking).to(logits.device)
    asked = asking.tolist()
    chosen = [token_ids[row] for row in asked]
    numbers = params["num_logprobs"][asking].tolist()
    return dict(zip(asked, token_logprobs(take(logits, rows), chosen, numbers), strict=True))
