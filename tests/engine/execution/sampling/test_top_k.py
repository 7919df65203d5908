"""The largest values, found by tiles, are those that a plain search finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.sampling.filters import mass
from engine.execution.sampling.top_k import TILE, first_largest, largest
from tests.engine.execution.sampling.bench import random_logits

widths = st.sampled_from([1, 5, TILE - 1, TILE, TILE + 1, 2 * TILE, 7 * TILE + 13, 12 * TILE])


@settings(max_examples=120, derandomize=True)
@given(
    rows=st.integers(0, 4), width=widths, seed=st.integers(0, 99), levels=st.sampled_from([None, 0.1, 1.0])
)
def test_the_first_of_the_largest(rows: int, width: int, seed: int, levels: float | None) -> None:
    """`levels`: so few distinct values that the largest stands in many tiles, also behind the last."""
    logits = random_logits(rows, width, seed)
    if levels:
        logits = (logits * levels).round()
    values, places = first_largest(logits)
    right = logits.max(-1)
    assert values.tolist() == right.values.tolist()
    # Of equal ones numpy promises the first.
    assert places.tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("place", [0, TILE + 3, 5 * TILE + 2])
def test_nan_is_the_largest(place: int) -> None:
    logits = random_logits(2, 5 * TILE + 9)
    logits[1, place] = torch.nan
    values, places = first_largest(logits)
    assert values.isnan().tolist() == [False, True]
    assert places[1] == place
    assert largest(logits, 2)[0].isnan()[:, 0].tolist() == [False, True]


@settings(max_examples=120, derandomize=True)
@given(
    width=st.sampled_from([40, 7 * TILE + 13, 12 * TILE, 50 * TILE + 1]),
    number=st.sampled_from([1, 3, 6, 40]),
    seed=st.integers(0, 99),
    levels=st.sampled_from([None, 0.1, 1.0]),
    low=st.booleans(),
)
def test_the_largest_of_each_row(width: int, number: int, seed: int, levels: float | None, low: bool) -> None:
    """With `low`, there are fewer than `number` finite values."""
    logits = random_logits(3, width, seed)
    if levels:
        logits = (logits * levels).round()
    if low:
        logits[:, 2:] = -torch.inf
    values, places = largest(logits, number)
    assert values.tolist() == logits.topk(number).values.tolist()
    assert logits.gather(1, places).tolist() == values.tolist()
    assert all(len(set(row)) == number for row in places.tolist())


def test_a_rows_mass_does_not_depend_on_how_threads_share_the_work() -> None:
    """Top-p's threshold hangs on it: a lone row is split among threads, one of many is not."""
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
