"""The largest values found by tiles are those of a plain search."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.sampling.filters import mass
from engine.execution.sampling.top_k import TILE, row_max, top_k
from tests.engine.execution.sampling.bench import random_logits

widths = st.sampled_from([1, 5, TILE - 1, TILE, TILE + 1, 2 * TILE, 7 * TILE + 13, 12 * TILE])


@settings(max_examples=120, derandomize=True)
@given(
    rows=st.integers(0, 4), width=widths, seed=st.integers(0, 99), levels=st.sampled_from([None, 0.1, 1.0])
)
def test_row_max_is_the_first_maximum(rows: int, width: int, seed: int, levels: float | None) -> None:
    """`levels`: few distinct values, so that the largest occurs in many tiles and after the last."""
    logits = random_logits(rows, width, seed)
    if levels:
        logits = (logits * levels).round()
    values, indices = row_max(logits)
    right = logits.max(-1)
    assert values.tolist() == right.values.tolist()
    # numpy returns the first of equal values.
    assert indices.tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("index", [0, TILE + 3, 5 * TILE + 2])
def test_nan_is_the_largest(index: int) -> None:
    logits = random_logits(2, 5 * TILE + 9)
    logits[1, index] = torch.nan
    values, indices = row_max(logits)
    assert values.isnan().tolist() == [False, True]
    assert indices[1] == index
    assert top_k(logits, 2)[0].isnan()[:, 0].tolist() == [False, True]


@settings(max_examples=120, derandomize=True)
@given(
    width=st.sampled_from([40, 7 * TILE + 13, 12 * TILE, 50 * TILE + 1]),
    number=st.sampled_from([1, 3, 6, 40]),
    seed=st.integers(0, 99),
    levels=st.sampled_from([None, 0.1, 1.0]),
    low=st.booleans(),
)
def test_top_k_of_each_row(width: int, number: int, seed: int, levels: float | None, low: bool) -> None:
    """With `low`, fewer than `number` values are finite."""
    logits = random_logits(3, width, seed)
    if levels:
        logits = (logits * levels).round()
    if low:
        logits[:, 2:] = -torch.inf
    values, indices = top_k(logits, number)
    assert values.tolist() == logits.topk(number).values.tolist()
    assert logits.gather(1, indices).tolist() == values.tolist()
    assert all(len(set(row)) == number for row in indices.tolist())


def test_the_mass_of_a_row_does_not_depend_on_the_threads() -> None:
    """A single row is split among threads, one of many is not, and top-p depends on the mass."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        logits = random_logits(16, 49_152)
        logits -= logits.amax(-1, keepdim=True)
        together = mass(logits).tolist()
        assert together == [float(mass(logits[[at]])) for at in range(16)]
    finally:
        torch.set_num_threads(before)
    right = logits.double().exp().sum(-1)
    torch.testing.assert_close(torch.tensor(together, dtype=torch.float64), right, rtol=1e-6, atol=0)
