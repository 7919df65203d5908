"""Sums of probabilities tell tokens apart that are a hundred million times less likely than the likeliest."""

import math

import pytest
import torch

from engine.execution.sampling.filters import MASS_UNIT, Filters, decide, mass, thresholds_of_sorted
from tests.engine.execution.sampling.bench import random_logits

UNLIKELY, UNLIKELIER = -17.0, -18.0
"""Less than half of what a float32 of the size of 1 can tell apart."""


def test_the_mass_loses_less_than_its_unit_for_each_token() -> None:
    logits = random_logits(2, 200_000).clamp_(max=0.0)
    logits[:, 0] = 0.0
    exact = [math.fsum(row) for row in logits.exp().tolist()]
    allowed = logits.shape[1] * MASS_UNIT
    assert mass(logits).tolist() == pytest.approx(exact, rel=0, abs=allowed)


def test_top_p_tells_the_least_likely_apart() -> None:
    values = torch.tensor([[0.0, UNLIKELY, UNLIKELIER]])
    weights = values.exp().double()
    total = weights.sum(-1)
    # The second token is needed to hold p together, the third one is not.
    top_p = (1 + weights[:, 1] / 2) / total
    filters = Filters(torch.tensor([3]), top_p)
    assert thresholds_of_sorted(values, filters).tolist() == [UNLIKELY]
    threshold, is_decided = decide(values, total, filters, vocab_size=3)
    assert (threshold.tolist(), is_decided.tolist()) == ([UNLIKELY], [True])
