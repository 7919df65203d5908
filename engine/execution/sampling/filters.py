"""Top-k and top-p as thresholds: which values stay, decided for each row by that row alone.

Law: a filter is a threshold on values, so tokens of one value share one fate, and no order of sorting shows.
Top-k keeps every token at least as likely as the k-th most likely one. Top-p, over what top-k keeps, keeps
every token such that those more likely than it hold less than p together. The most likely one always stays.

The vocabulary is not sorted: most answers lie within a row's largest `WINDOW` values. `decide` says for which
rows they do not; these alone are sorted whole.
"""

from dataclasses import dataclass

import torch

WINDOW = 256
MASS_UNIT = 2.0**-44
"""What shares of the likeliest token's mass are counted in: as many as a vocabulary of 2**19 can have fit an
int64, and of one with 2**18 tokens less than 2**-26 is lost."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Per row: `top_k` [rows] int64 (the vocabulary's size: off), `top_p` [rows] float64 (1: off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor

    def of(self, rows: torch.Tensor) -> "Filters":
        return Filters(self.top_k[rows], self.top_p[rows])


def mass(logits: torch.Tensor) -> torch.Tensor:
    """The sum of each row's exponentials [rows], in float64; the largest of `logits` is 0.

    Added up as integers, of which every order of adding makes the same. A sum of floats would depend on the
    rows beside it: a lone row is split among threads, and its parts are added up in another order.
    """
    return logits.exp().mul_(1 / MASS_UNIT).long().sum(-1).double() * MASS_UNIT


def decide(
    largest: torch.Tensor, total: torch.Tensor, filters: Filters, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds [rows] by the `largest` [rows, window] of each row's logits, in descending order.

    Each row's logits are shifted so that their largest is 0; `total` [rows]: their `mass`. Returns also which
    rows are decided: only there is the threshold right, and does all that reaches it stand in the window.
    """
    by_k, by_p = _thresholds(largest, total, filters, vocab_size)
    threshold = torch.maximum(by_k, by_p)
    if largest.shape[1] == vocab_size:
        return threshold, torch.ones_like(threshold, dtype=torch.bool)
    # What equals the window's last value may stand outside it too.
    last = largest[:, -1]
    return threshold, ((filters.top_k == vocab_size) | (by_k > last)) & (threshold > last)


def thresholds_of_sorted(values: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Thresholds [rows] of whole rows [rows, vocabulary] in descending order, their largest shifted to 0."""
    total = values.exp().double().cumsum(-1)[:, -1]
    return torch.maximum(*_thresholds(values, total, filters, values.shape[1]))


def _thresholds(
    values: torch.Tensor, total: torch.Tensor, filters: Filters, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's threshold by top-k and by top-p, from its first `values`, as far as these reach.

    `total` [rows]: the mass of the whole row.
    """
    width = values.shape[1]
    by_k = values.gather(1, filters.top_k.clamp(max=width)[:, None] - 1)
    weights = values.exp().double()
    # Summed up in one order: how a plain sum adds depends on the number of rows and threads.
    mass_so_far = weights.cumsum(-1)
    num_by_k = (values >= by_k).sum(-1, keepdim=True).clamp(min=1)
    mass_by_k = mass_so_far.gather(1, num_by_k - 1)[:, 0]
    kept = torch.where(filters.top_k == vocab_size, total, mass_by_k)
    more_likely = mass_so_far - weights
    num_kept = (more_likely < (filters.top_p * kept)[:, None]).sum(-1, keepdim=True)
    # None at all in a row with NaN, which must not become an index out of range.
    by_p = values.gather(1, num_kept.clamp(min=1) - 1)
    return (
        by_k[:, 0].masked_fill(filters.top_k == vocab_size, -torch.inf),
        by_p[:, 0].masked_fill(filters.top_p == 1, -torch.inf),
    )
