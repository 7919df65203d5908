"""Draws random tokens with torch: temperature, top-k, top-p and min-p as thresholds, then the Gumbel-max
trick.

A row's token depends on its own logits and parameters only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.filters import WINDOW, Filters, mass, sorted_thresholds, window_thresholds
from engine.execution.sampling.gumbel import gumbel_noise, row_keys
from engine.execution.sampling.slot_params import Integers, Params
from engine.execution.sampling.top_k import top_k


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of random rows, each [rows]; `keys` [rows, 2] select the noise.

    `threshold`: min-p drops tokens below it, where the row's largest logit is 0. `filtered`, `unfiltered`:
    rows with and without top-k or top-p.
    """

    temperature: torch.Tensor
    filters: Filters
    threshold: torch.Tensor
    keys: torch.Tensor
    filtered: torch.Tensor
    unfiltered: torch.Tensor

    @classmethod
    def of(cls, params: Params, indices: Integers, vocab_size: int, device: torch.device) -> "Draws":
        """`indices`: the number of tokens of each output."""
        limits = limited_top_k(params, vocab_size)
        filtered = (limits < vocab_size) | (params["top_p"] < 1)

        def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
            # A field of one row counts as contiguous, but its stride is the row's.
            return copy_to_device(torch.from_numpy(array.copy()), device)

        return cls(
            temperature=on_device(params["temperature"]),
            filters=Filters(on_device(limits), on_device(params["top_p"])),
            threshold=on_device(min_p_thresholds(params)),
            keys=row_keys(params["seed_state"], indices, device),
            filtered=on_device(np.flatnonzero(filtered)),
            unfiltered=on_device(np.flatnonzero(~filtered)),
        )


def limited_top_k(params: Params, vocab_size: int) -> Integers:
    """The top-k of each row; `vocab_size` if off."""
    return np.where(params["top_k"] == 0, vocab_size, np.minimum(params["top_k"], vocab_size))


def min_p_thresholds(params: Params) -> npt.NDArray[np.float32]:
    """Min-p drops logits below this, where the row's largest is 0."""
    with np.errstate(divide="ignore"):
        thresholds: npt.NDArray[np.float64] = np.log(params["min_p"])
    return thresholds.astype(np.float32)


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Tokens [rows] from logits [rows, vocabulary] after temperature, the largest of each row at 0."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    threshold = draws.threshold.clone()
    whole = draws.unfiltered
    if len(draws.filtered):
        undecided = _draw_from_window(logits, draws, tokens)
        if len(undecided):
            values = select_rows(logits, undecided).sort(-1, descending=True).values
            by_filters = sorted_thresholds(values, draws.filters.select(undecided))
            threshold[undecided] = torch.maximum(threshold[undecided], by_filters)
        whole = torch.cat([whole, undecided]).sort().values
    if len(whole):
        tokens[whole] = _draw_from_all(select_rows(logits, whole), threshold[whole], draws.keys[whole])
    return tokens


def _draw_from_window(logits: torch.Tensor, draws: Draws, tokens: torch.Tensor) -> torch.Tensor:
    """Draw filtered rows among their most likely tokens; returns the rows that need more."""
    rows = draws.filtered
    logits = select_rows(logits, rows)
    values, token_ids = top_k(logits, min(WINDOW, logits.shape[1]))
    filters = draws.filters.select(rows)
    threshold, decided = window_thresholds(values, mass(logits), filters, logits.shape[1])
    threshold = torch.maximum(threshold, draws.threshold[rows])
    noisy = _with_noise(values, threshold, draws.keys[rows], token_ids.int())
    wins = noisy == noisy.amax(-1, keepdim=True)
    # The first of equal ones, in whatever order they were found. No token wins in a row with NaN.
    tokens[rows] = token_ids.masked_fill(~wins, logits.shape[1] - 1).amin(-1)
    return rows[~decided]


def _draw_from_all(logits: torch.Tensor, threshold: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw among all tokens; `logits` [rows, vocabulary], `threshold` [rows], `keys` [rows, 2]."""
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return _with_noise(logits, threshold, keys, token_ids).argmax(-1)


def select_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`logits[rows]` for ascending `rows`, without a copy if these are all rows."""
    return logits if len(rows) == len(logits) else logits[rows]


def _with_noise(
    logits: torch.Tensor, threshold: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits plus noise; -inf below the row's `threshold`."""
    return logits.masked_fill(logits < threshold[:, None], -torch.inf) + gumbel_noise(keys, token_ids)
