"""What a request's own tokens, and its bias, add to or take off its logits.

Law: of one row only the logits of tokens that stand in its sequence, or in its bias, are touched. Counts are
kept from step to step, and are those that the sequence's tokens give. Knows no masks and no draws.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.sequence import Sequence

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
HIGHEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def within(token_ids: list[int], vocab_size: int) -> list[int]:
    """Those that the row has a place for: any other would be in another request's row."""
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


class TokenCounts:
    """The tokens of one sequence that its penalties are about, each once, and what is taken off their logits.

    With a repetition penalty these are the prompt's and the output's, otherwise the output's. A step costs as
    much as it brought tokens, not as much as there are.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        self._token_ids = np.empty(64, dtype=np.int64)
        self._taken = np.zeros(64, dtype=np.float32)
        if sequence.params.repetition_penalty != 1:
            for token_id in within(list(dict.fromkeys(sequence.prompt_token_ids)), vocab_size):
                self._place(token_id)
        self._num_seen = sequence.num_prompt_tokens
        self.catch_up()

    @property
    def token_ids(self) -> Integers:
        return self._token_ids[: len(self._counts)]

    @property
    def taken(self) -> Floats:
        """What frequency and presence penalty take off each one's logit."""
        return self._taken[: len(self._counts)]

    def catch_up(self) -> None:
        """Count the tokens that the sequence has got since the last time."""
        params = self._sequence.params
        for token_id in within(self._sequence.token_ids[self._num_seen :], self._vocab_size):
            place = self._place(token_id)
            self._counts[place] += 1
            self._taken[place] = params.frequency_penalty * self._counts[place] + params.presence_penalty
        self._num_seen = self._sequence.num_tokens

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._counts))
        if place == len(self._counts):
            self._counts.append(0)
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                self._taken = np.concatenate([self._taken, np.zeros_like(self._taken)])
            self._token_ids[place] = token_id
        return place


class Bias:
    """What a request adds to the logits of some tokens."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        bias = sequence.params.logit_bias
        token_ids = within(list(bias), vocab_size)
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.values = np.array([bias[token_id] for token_id in token_ids], dtype=np.float32)


def penalize(logits: torch.Tensor, counts: list[tuple[int, float, TokenCounts]]) -> None:
    """Change `logits` [rows, vocabulary] in place; `counts`: row, repetition penalty, and its tokens.

    The repetition penalty comes first: it divides positive logits and multiplies negative ones (CTRL,
    arXiv:1909.05858; transformers). The others are taken off (OpenAI).
    """
    if not counts:
        return
    places = _places(logits, [(row, one.token_ids) for row, _, one in counts])
    lengths = [len(one.token_ids) for _, _, one in counts]
    # Not zero in float32: -inf times zero is no number.
    penalties = [max(penalty, SMALLEST) for _, penalty, _ in counts]
    repetition = np.repeat(np.array(penalties, dtype=np.float32), lengths)
    taken = np.concatenate([one.taken for _, _, one in counts])
    divisor = copy_to_device(torch.from_numpy(repetition), logits.device)
    flat = logits.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / divisor, values * divisor)
    values -= copy_to_device(torch.from_numpy(taken), logits.device)
    # A small divisor must not make infinity of a large logit: nothing could be subtracted from it.
    flat[places] = values.clamp_(max=HIGHEST)


def add_bias(logits: torch.Tensor, biases: list[tuple[int, Bias]]) -> None:
    """Change `logits` [rows, vocabulary] in place."""
    if biases:
        places = _places(logits, [(row, one.token_ids) for row, one in biases])
        values = np.concatenate([one.values for _, one in biases])
        logits.view(-1).index_add_(0, places, copy_to_device(torch.from_numpy(values), logits.device))


def _places(logits: torch.Tensor, token_ids: list[tuple[int, Integers]]) -> torch.Tensor:
    """Where the tokens of each row stand in the flat `logits`."""
    vocab_size = logits.shape[1]
    places = np.concatenate([row * vocab_size + ids for row, ids in token_ids])
    return copy_to_device(torch.from_numpy(places), logits.device)
