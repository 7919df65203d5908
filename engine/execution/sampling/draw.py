"""Draws random tokens: filters as thresholds, noise as a pure function, and then the largest.

Law: a row's token depends on its logits and its own parameters alone. The order is temperature, top-k, top-p,
min-p, then the largest of logit + noise. This file does not know where logits come from.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.filters import WINDOW, Filters, decide, mass, thresholds_of_sorted
from engine.execution.sampling.gumbel import gumbel_noise, row_keys
from engine.execution.sampling.slot_params import Numbers, Rows
from engine.execution.sampling.top_k import largest


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of the rows that are drawn at random, each [rows]; `keys` [rows, 2] name the noise.

    `lowest`: what min-p leaves out lies below this, on a scale where the row's largest logit is 0.
    `filtered`, `unfiltered`: the rows that do or do not ask for top-k or top-p.
    """

    temperature: torch.Tensor
    filters: Filters
    lowest: torch.Tensor
    keys: torch.Tensor
    filtered: torch.Tensor
    unfiltered: torch.Tensor

    @classmethod
    def of(cls, params: Rows, indices: Numbers, vocab_size: int, device: torch.device) -> "Draws":
        """`indices`: how many tokens each output has."""
        top_k = limited_top_k(params, vocab_size)
        filtered = (top_k < vocab_size) | (params["top_p"] < 1)

        def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
            # A field of one row counts as contiguous, and yet its stride is the row's.
            return copy_to_device(torch.from_numpy(array.copy()), device)

        return cls(
            temperature=on_device(params["temperature"]),
            filters=Filters(on_device(top_k), on_device(params["top_p"])),
            lowest=on_device(least_logits(params)),
            keys=row_keys(params["seed_state"], indices, device),
            filtered=on_device(np.flatnonzero(filtered)),
            unfiltered=on_device(np.flatnonzero(~filtered)),
        )


def limited_top_k(params: Rows, vocab_size: int) -> Numbers:
    """Each row's top-k; `vocab_size` where it is off."""
    return np.where(params["top_k"] == 0, vocab_size, np.minimum(params["top_k"], vocab_size))


def least_logits(params: Rows) -> npt.NDArray[np.float32]:
    """What min-p leaves out is below this, where the row's largest logit is 0."""
    with np.errstate(divide="ignore"):
        lowest: npt.NDArray[np.float64] = np.log(params["min_p"])
    return lowest.astype(np.float32)


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Tokens [rows] from logits [rows, vocabulary] after temperature, each row's largest shifted to 0."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    lowest = draws.lowest.clone()
    whole = draws.unfiltered
    if len(draws.filtered):
        undecided = _draw_from_window(logits, draws, tokens)
        if len(undecided):
            values = take(logits, undecided).sort(-1, descending=True).values
            threshold = thresholds_of_sorted(values, draws.filters.of(undecided))
            lowest[undecided] = torch.maximum(lowest[undecided], threshold)
        whole = torch.cat([whole, undecided]).sort().values
    if len(whole):
        tokens[whole] = _draw_from_all(take(logits, whole), lowest[whole], draws.keys[whole])
    return tokens


def _draw_from_window(logits: torch.Tensor, draws: Draws, tokens: torch.Tensor) -> torch.Tensor:
    """Draw filtered rows among their most likely tokens; returns the rows for which these are too few."""
    rows = draws.filtered
    logits = take(logits, rows)
    values, token_ids = largest(logits, min(WINDOW, logits.shape[1]))
    threshold, decided = decide(values, mass(logits), draws.filters.of(rows), logits.shape[1])
    lowest = torch.maximum(threshold, draws.lowest[rows])
    noisy = _with_noise(values, lowest, draws.keys[rows], token_ids.int())
    wins = noisy == noisy.amax(-1, keepdim=True)
    # Of equal ones the first, whichever order they were found in. None wins in a row with NaN.
    tokens[rows] = token_ids.masked_fill(~wins, logits.shape[1] - 1).amin(-1)
    return rows[~decided]


def _draw_from_all(logits: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw among all tokens; `logits` [rows, vocabulary], `lowest` [rows], `keys` [rows, 2]."""
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return _with_noise(logits, lowest, keys, token_ids).argmax(-1)


def take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`logits[rows]` for ascending `rows`, without a copy when these are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _with_noise(
    logits: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits plus each token's noise; -inf for those under their row's `lowest`."""
    return logits.masked_fill(logits < lowest[:, None], -torch.inf) + gumbel_noise(keys, token_ids)
