"""A reference sampler: recomputes the tokens of a request from logits that `transformers` computed.

It implements the sampling rules independently of the service, in float64 and one row at a time. Only the
noise, a function of seed, index and token, is the service's.

A float32 logit varies by up to `NEAR_TIE` with the other rows of its batch. A token that this explains is a
near tie; any other difference is an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.constraints import Grammar
from engine.execution.sampling.gumbel import gumbel_noise, row_keys, seed_states
from engine.requests.parallel_outputs import params_of_output
from engine.sampling_params import SamplingParams
from tests.comparer import NEAR_TIE

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Choice:
    """The result for one token. `lead`: score of the reference's token minus its score, 0 if they agree.

    `is_possible`: a change of `NEAR_TIE` in the logits explains the difference.
    """

    lead: float
    is_possible: bool


class Draws:
    """The draws of one output of a request. `body`: the request; `index`: the output; `grammar`: if any."""

    def __init__(self, body: Mapping[str, Any], index: int, grammar: Grammar | None = None) -> None:
        self._body = body
        self._grammar = grammar
        params = SamplingParams(seed=body.get("seed", 0))
        self._states = seed_states([params_of_output(params, index).seed])

    def choice(self, logits: torch.Tensor, token_ids: list[int]) -> Choice:
        """Check the last token. `logits` [vocab_size]: the model's output after the other tokens."""
        *before, token_id = token_ids
        allowed = self._edited(logits.double(), before)
        temperature = self._body["temperature"]
        if temperature == 0:
            lead = float(allowed.max() - allowed[token_id])
            return Choice(lead, lead < NEAR_TIE)
        scaled = allowed / temperature
        move = NEAR_TIE / temperature
        noise = gumbel_noise(row_keys(self._states, [len(before)], CPU), torch.arange(len(scaled)))[0]
        scores = scaled + noise
        nominal, strict, loose = (self._kept(scaled, by) for by in (0.0, -move, move))
        lead = float(scores[nominal].max() - scores[token_id])
        if nominal[token_id] and lead <= 0:
            return Choice(0.0, True)
        certain = scores[strict].max() if strict.any() else -math.inf
        return Choice(abs(lead), bool(loose[token_id] and scores[token_id] > certain - 2 * move))

    def _edited(self, logits: torch.Tensor, before: list[int]) -> torch.Tensor:
        edited = logits.clone()
        if penalty := self._body.get("frequency_penalty", 0):
            edited -= penalty * torch.bincount(torch.tensor(before, dtype=torch.int64), minlength=len(edited))
        if self._grammar is not None:
            self._grammar.advance(before)
            words = np.zeros(-(-len(edited) // 32), dtype=np.int32)
            self._grammar.fill_bitmask(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(edited)]
            edited[torch.from_numpy(bits == 0)] = -math.inf
        return edited

    def _kept(self, scaled: torch.Tensor, move: float) -> torch.Tensor:
        """Tokens that the filters keep if logits change by up to `move`. A negative `move` keeps fewer."""
        body = self._body
        kept = scaled > -math.inf
        if top_k := body.get("top_k"):
            kept &= scaled >= scaled.topk(top_k).values[-1] - 2 * move
        if min_p := body.get("min_p"):
            kept &= scaled >= scaled.max() + math.log(min_p) - 2 * move
        if top_p := body.get("top_p"):
            ordered, places = scaled.softmax(-1).sort(descending=True)
            # A change of all logits by `move` changes each probability by less than this factor.
            likelier = (ordered.cumsum(-1) - ordered) * math.exp(-2 * move)
            kept &= torch.zeros_like(kept).index_put((places,), likelier < top_p)
        return kept
