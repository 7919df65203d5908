"""Sums of probabilities resolve tokens that are a hundred million times less likely than the most likely."""

import math

import pytest
import torch

from engine.execution.sampling.filters import MASS_UNIT, Filters, mass, sorted_thresholds, window_thresholds
from tests.engine.execution.sampling.bench import random_logits

UNLIKELY, UNLIKELIER = -17.0, -18.0
"""Less than half of the resolution of a float32 near 1."""


def test_the_mass_loses_less_than_its_unit_per_token() -> None:
    logits = random_logits(2, 200_000).clamp_(max=0.0)
    logits[:, 0] = 0.0
    exact = [math.fsum(row) for row in logits.exp().tolist()]
    allowed = logits.shape[1] * MASS_UNIT
    assert mass(logits).tolist() == pytest.approx(exact, rel=0, abs=allowed)


def test_top_p_resolves_unlikely_tokens() -> None:
    values = torch.tensor([[0.0, UNLIKELY, UNLIKELIER]])
    weights = values.exp().double()
    total = weights.sum(-1)
    # Top-p needs the second token and not the third.
    top_p = (1 + weights[:, 1] / 2) / total
    filters = Filters(torch.tensor([3]), top_p)
    assert sorted_thresholds(values, filters).tolist() == [UNLIKELY]
    threshold, is_decided = window_thresholds(values, total, filters, vocab_size=3)
    assert (threshold.tolist(), is_decided.tolist()) == ([UNLIKELY], [True])
