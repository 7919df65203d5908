"""Which tokens a request may have got: its draws once more, from logits that `transformers` computed.

The rules are written down here a second time, in float64 and one row at a time, so that the service's own
sampler is not asked about itself. Only the noise is the service's: a function of seed, index and token.

A float32 logit moves by up to `NEAR_TIE` with the rows beside it. A token that such a move explains is a near
tie; any other token is wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.constraints import Grammar
from engine.execution.sampling.gumbel import gumbel_noise, row_keys, seed_states
from engine.requests.input_processor import params_of_output
from engine.sampling_params import SamplingParams
from tests.comparer import NEAR_TIE

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Choice:
    """How far a token is from the one that the reference draws. `lead`: of the score, 0 where they agree.

    `is_possible`: a move of `NEAR_TIE` in the logits explains the difference.
    """

    lead: float
    is_possible: bool


class Draws:
    """The draws of one output of a request. `body`: as it was sent; `index`: which of its outputs.

    `grammar`: where its text has to follow one.
    """

    def __init__(self, body: Mapping[str, Any], index: int, grammar: Grammar | None = None) -> None:
        self._body = body
        self._grammar = grammar
        params = SamplingParams(seed=body.get("seed", 0))
        self._states = seed_states([params_of_output(params, index).seed])

    def choice(self, logits: torch.Tensor, token_ids: list[int]) -> Choice:
        """Judge the last token. `logits` [vocabulary]: what the model gives after the others."""
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
        """Tokens that the filters keep where each logit may move by `move`; a negative one keeps fewer."""
        body = self._body
        kept = scaled > -math.inf
        if top_k := body.get("top_k"):
            kept &= scaled >= scaled.topk(top_k).values[-1] - 2 * move
        if min_p := body.get("min_p"):
            kept &= scaled >= scaled.max() + math.log(min_p) - 2 * move
        if top_p := body.get("top_p"):
            ordered, places = scaled.softmax(-1).sort(descending=True)
            # A move of all logits changes each share by less than this factor.
            likelier = (ordered.cumsum(-1) - ordered) * math.exp(-2 * move)
            kept &= torch.zeros_like(kept).index_put((places,), likelier < top_p)
        return kept
