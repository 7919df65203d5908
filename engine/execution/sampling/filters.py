"""Top-k and top-p as thresholds on logits, for each row by itself.

Equal values are kept or dropped together, so the order of sorting does not matter. Top-k keeps every token at
least as likely as the k-th. Top-p keeps every token of these for which the more likely ones hold less than p
together. The most likely token always stays.

The vocabulary is not sorted: the threshold of most rows lies within their `WINDOW` largest values.
`window_thresholds` says which rows need to be sorted.
"""

from dataclasses import dataclass

import torch

WINDOW = 256
MASS_UNIT = 2.0**-44
"""The unit of masses, where the most likely token has mass 1. A vocabulary of 2**19 tokens fits an int64, and
one
of 2**18 tokens loses less than 2**-26."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Per row: `top_k` [rows] int64 (the vocabulary's size: off), `top_p` [rows] float64 (1: off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor

    def select(self, rows: torch.Tensor) -> "Filters":
        return Filters(self.top_k[rows], self.top_p[rows])


def mass(logits: torch.Tensor) -> torch.Tensor:
    """The sum of exponentials of each row [rows], in float64; the largest of `logits` is 0.

    Integers are summed, whose sum does not depend on the order. A sum of floats would depend on the batch: a
    single row is split among threads, which changes the order.
    """
    return logits.exp().mul_(1 / MASS_UNIT).long().sum(-1).double() * MASS_UNIT


def window_thresholds(
    values: torch.Tensor, total: torch.Tensor, filters: Filters, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds [rows] from the largest `values` [rows, window] of each row, descending from 0.

    `total` [rows]: the `mass` of the rows. Also returns which rows are decided: only their thresholds are
    right, and all values that reach them lie in the window.
    """
    by_k, by_p = _thresholds(values, total, filters, vocab_size)
    threshold = torch.maximum(by_k, by_p)
    if values.shape[1] == vocab_size:
        return threshold, torch.ones_like(threshold, dtype=torch.bool)
    # Values equal to the last one may also lie outside the window.
    last = values[:, -1]
    return threshold, ((filters.top_k == vocab_size) | (by_k > last)) & (threshold > last)


def sorted_thresholds(values: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Thresholds [rows] of whole rows [rows, vocabulary], descending from 0."""
    total = values.exp().double().cumsum(-1)[:, -1]
    return torch.maximum(*_thresholds(values, total, filters, values.shape[1]))


def _thresholds(
    values: torch.Tensor, total: torch.Tensor, filters: Filters, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The thresholds of each row by top-k and by top-p, from its first `values`.

    `total` [rows]: the mass of the whole row.
    """
    width = values.shape[1]
    by_k = values.gather(1, filters.top_k.clamp(max=width)[:, None] - 1)
    weights = values.exp().double()
    # `cumsum` adds in order; the order of `sum` depends on the number of rows and threads.
    mass_so_far = weights.cumsum(-1)
    num_by_k = (values >= by_k).sum(-1, keepdim=True).clamp(min=1)
    mass_by_k = mass_so_far.gather(1, num_by_k - 1)[:, 0]
    kept = torch.where(filters.top_k == vocab_size, total, mass_by_k)
    more_likely = mass_so_far - weights
    num_kept = (more_likely < (filters.top_p * kept)[:, None]).sum(-1, keepdim=True)
    # A row with NaN keeps none; the index must stay in range.
    by_p = values.gather(1, num_kept.clamp(min=1) - 1)
    return (
        by_k[:, 0].masked_fill(filters.top_k == vocab_size, -torch.inf),
        by_p[:, 0].masked_fill(filters.top_p == 1, -torch.inf),
    )
