"""Draws the next token of each row: a pure function of the row, its request's parameters and output index.

Law: a row's token depends on nothing else: not on the other rows, not on any generator's state. The order is
temperature, top-k, top-p, min-p, then the largest of logit + noise. This file does not know sequences'
states, stops or texts.
"""

from dataclasses import dataclass

import torch

from engine.execution.faults import device_faults
from engine.execution.filters import WINDOW, Filters, decide, thresholds_of_sorted
from engine.execution.gumbel import gumbel_noise, row_keys
from engine.outputs import SampledToken, ScheduledSequence
from engine.sequence import Sequence

NON_FINITE = "the model computed non-finite logits"
TILE = 2048
"""Tokens whose noise is made at once on a CPU, so that it stays in the cache: a third of the time."""
HIGHEST_TEMPERATURE = 1e30
"""All tokens are equally likely long before; more would be infinite in float32."""


class Sampler:
    """Draws for a whole batch at once; has no state."""

    def sample(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        """One token for each item that samples, in order.

        `logits` [wanted rows of all items, vocabulary], any float dtype. A row that has NaN or +inf, or
        nothing but -inf, gives an error and no token. Raises `DeviceLost`.
        """
        rows, sequences = _sampling_rows(items)
        if not rows:
            return []
        with device_faults(), torch.inference_mode():
            if len(rows) < len(logits):
                logits = logits[torch.tensor(rows, device=logits.device)]
            logits = logits.float()
            # The largest of a row with NaN is NaN.
            largest, tokens = logits.max(-1)
            self._draw_random(logits, largest, tokens, sequences)
            drawn = torch.where(largest.isfinite(), tokens, -1).tolist()
        return [SampledToken(token) if token >= 0 else SampledToken(None, NON_FINITE) for token in drawn]

    def _draw_random(
        self, logits: torch.Tensor, largest: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]
    ) -> None:
        """Replace the most likely token where a request asks for a random one."""
        random = [row for row, sequence in enumerate(sequences) if not sequence.params.is_greedy]
        if not random:
            return
        rows = torch.tensor(random, device=logits.device)
        draws = Draws.of([sequences[row] for row in random], logits.shape[1], logits.device)
        # Shifted before it is divided: the draw is the same, and nothing overflows at a small temperature.
        shifted = _take(logits, rows) - largest[rows, None]
        tokens[rows] = draw(shifted.div_(draws.temperature[:, None]), draws)


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
            temperature=torch.tensor(
                [min(p.temperature, HIGHEST_TEMPERATURE) for p in params], dtype=torch.float32, device=device
            ),
            filters=Filters(top_k.to(device), top_p.to(device)),
            lowest=min_p.log().float().to(device),
            keys=row_keys([(s.params.seed, s.num_output_tokens) for s in sequences], device),
            filtered=filtered.nonzero()[:, 0].to(device),
            unfiltered=(~filtered).nonzero()[:, 0].to(device),
        )


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Tokens [rows] from logits [rows, vocabulary] after temperature, each row's largest shifted to 0."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    lowest = draws.lowest.clone()
    whole = draws.unfiltered
    if len(draws.filtered):
        undecided = _draw_from_window(logits, draws, tokens)
        if len(undecided):
            values = _take(logits, undecided).sort(-1, descending=True).values
            threshold = thresholds_of_sorted(values, draws.filters.of(undecided))
            lowest[undecided] = torch.maximum(lowest[undecided], threshold)
        whole = torch.cat([whole, undecided]).sort().values
    if len(whole):
        tokens[whole] = _draw_from_all(_take(logits, whole), lowest[whole], draws.keys[whole])
    return tokens


def _draw_from_window(logits: torch.Tensor, draws: Draws, tokens: torch.Tensor) -> torch.Tensor:
    """Draw filtered rows among their most likely tokens; returns the rows for which these are too few."""
    rows = draws.filtered
    logits = _take(logits, rows)
    values, token_ids = logits.topk(min(WINDOW, logits.shape[1]))
    threshold, decided = decide(values, logits, draws.filters.of(rows))
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


def _take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`logits[rows]` for ascending `rows`, without a copy when these are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _with_noise(
    logits: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits plus each token's noise; -inf for those under their row's `lowest`."""
    return logits.masked_fill(logits < lowest[:, None], -torch.inf) + gumbel_noise(keys, token_ids)
