"""Draws random tokens: filters as thresholds, noise as a pure function, and then the largest.

Law: a row's token depends on its logits and its own parameters alone. The order is temperature, top-k, top-p,
min-p, then the largest of logit + noise. This file does not know where logits come from.
"""

from dataclasses import dataclass

import torch

from engine.execution.crossing import sent
from engine.execution.filters import WINDOW, Filters, decide, mass, thresholds_of_sorted
from engine.execution.gumbel import gumbel_noise, row_keys
from engine.execution.largest import largest
from engine.sequence import Sequence

TILE = 2048
"""Tokens whose noise is made at once on a CPU, so that it stays in the cache: a third of the time."""
HIGHEST_TEMPERATURE = 1e30
"""All tokens are equally likely long before; more would be infinite in float32."""


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
    def of(cls, sequences: list[Sequence], vocab_size: int, device: torch.device) -> "Draws":
        params = [sequence.params for sequence in sequences]
        top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params])
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64)
        filtered = (top_k < vocab_size) | (top_p < 1)
        return cls(
            temperature=sent(
                torch.tensor([min(p.temperature, HIGHEST_TEMPERATURE) for p in params], dtype=torch.float32),
                device,
            ),
            filters=Filters(sent(top_k, device), sent(top_p, device)),
            lowest=sent(min_p.log().float(), device),
            keys=row_keys([(s.params.seed, s.num_output_tokens) for s in sequences], device),
            filtered=sent(filtered.nonzero()[:, 0], device),
            unfiltered=sent((~filtered).nonzero()[:, 0], device),
        )


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
    total = mass(logits, token_ids[:, 0])
    threshold, decided = decide(values, total, draws.filters.of(rows), logits.shape[1])
    lowest = torch.maximum(threshold, draws.lowest[rows])
    noisy = _with_noise(values, lowest, draws.keys[rows], token_ids.int())
    tokens[rows] = token_ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    return rows[~decided]


def _draw_from_all(logits: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw among all tokens; `logits` [rows, vocabulary], `lowest` [rows], `keys` [rows, 2]."""
    vocab_size, device = logits.shape[1], logits.device
    best = torch.full((len(logits),), -torch.inf, device=device)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
    width = TILE if device.type == "cpu" else vocab_size
    for start in range(0, vocab_size, width):
        tile = logits[:, start : start + width]
        token_ids = torch.arange(start, start + tile.shape[1], dtype=torch.int32, device=device)
        values, places = _with_noise(tile, lowest, keys, token_ids).max(-1)
        tokens = torch.where(values > best, places + start, tokens)
        best = torch.maximum(best, values)
    return tokens


def take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`logits[rows]` for ascending `rows`, without a copy when these are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _with_noise(
    logits: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits plus each token's noise; -inf for those under their row's `lowest`."""
    return logits.masked_fill(logits < lowest[:, None], -torch.inf) + gumbel_noise(keys, token_ids)
