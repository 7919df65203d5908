"""Repetition, frequency and presence penalties, and logit bias.

Only the logits of tokens in a sequence, or in its bias, change. Token counts are updated incrementally.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.sequence import Sequence

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
MAX_FLOAT, MIN_FLOAT = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def in_vocabulary(token_ids: list[int], vocab_size: int) -> list[int]:
    """Drops ids outside the vocabulary, which would fall into another request's row."""
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


class TokenCounts:
    """The distinct tokens of one sequence that are penalized, with their frequency and presence penalties.

    With a repetition penalty these are the prompt's and the output's, otherwise the output's. The cost of a
    step is proportional to its new tokens.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._indices: dict[int, int] = {}
        self._counts: list[int] = []
        self._token_ids = np.empty(64, dtype=np.int64)
        self._subtracted = np.zeros(64, dtype=np.float32)
        if sequence.params.repetition_penalty != 1:
            for token_id in in_vocabulary(list(dict.fromkeys(sequence.prompt_token_ids)), vocab_size):
                self._index_of(token_id)
        self._num_seen = sequence.num_prompt_tokens
        self.update()

    @property
    def token_ids(self) -> Integers:
        return self._token_ids[: len(self._counts)]

    @property
    def subtracted(self) -> Floats:
        """What the frequency and presence penalties subtract from each token's logit."""
        return self._subtracted[: len(self._counts)]

    def update(self) -> None:
        """Count the sequence's new tokens."""
        params = self._sequence.params
        for token_id in in_vocabulary(self._sequence.token_ids[self._num_seen :], self._vocab_size):
            index = self._index_of(token_id)
            self._counts[index] += 1
            self._subtracted[index] = params.frequency_penalty * self._counts[index] + params.presence_penalty
        self._num_seen = self._sequence.num_tokens

    def _index_of(self, token_id: int) -> int:
        index = self._indices.setdefault(token_id, len(self._counts))
        if index == len(self._counts):
            self._counts.append(0)
            if index == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                self._subtracted = np.concatenate([self._subtracted, np.zeros_like(self._subtracted)])
            self._token_ids[index] = token_id
        return index


class Bias:
    """What a request adds to the logits of some tokens."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        bias = sequence.params.logit_bias
        token_ids = in_vocabulary(list(bias), vocab_size)
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.values = np.array([bias[token_id] for token_id in token_ids], dtype=np.float32)


def penalize(logits: torch.Tensor, counts: list[tuple[int, float, TokenCounts]]) -> None:
    """Change `logits` [rows, vocabulary] in place; `counts`: (row, repetition penalty, token counts).

    The repetition penalty is applied first: it divides positive logits and multiplies negative ones (CTRL,
    arXiv:1909.05858; transformers). The others are subtracted (OpenAI).
    """
    if not counts:
        return
    indices = _flat_indices(logits, [(row, one.token_ids) for row, _, one in counts])
    lengths = [len(one.token_ids) for _, _, one in counts]
    # Zero in float32 would turn -inf into NaN.
    penalties = [max(penalty, MIN_FLOAT) for _, penalty, _ in counts]
    repetition = np.repeat(np.array(penalties, dtype=np.float32), lengths)
    subtracted = np.concatenate([one.subtracted for _, _, one in counts])
    divisor = copy_to_device(torch.from_numpy(repetition), logits.device)
    flat = logits.view(-1)
    values = flat[indices]
    values = torch.where(values > 0, values / divisor, values * divisor)
    values -= copy_to_device(torch.from_numpy(subtracted), logits.device)
    # A small divisor may make a large logit infinite, from which nothing could be subtracted.
    flat[indices] = values.clamp_(max=MAX_FLOAT)


def add_bias(logits: torch.Tensor, biases: list[tuple[int, Bias]]) -> None:
    """Change `logits` [rows, vocabulary] in place."""
    if biases:
        indices = _flat_indices(logits, [(row, one.token_ids) for row, one in biases])
        values = np.concatenate([one.values for _, one in biases])
        logits.view(-1).index_add_(0, indices, copy_to_device(torch.from_numpy(values), logits.device))


def _flat_indices(logits: torch.Tensor, token_ids: list[tuple[int, Integers]]) -> torch.Tensor:
    """The indices of each row's tokens in the flattened `logits`."""
    vocab_size = logits.shape[1]
    indices = np.concatenate([row * vocab_size + ids for row, ids in token_ids])
    return copy_to_device(torch.from_numpy(indices), logits.device)
