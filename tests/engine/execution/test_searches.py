"""The native searches find what torch's find, and the draw is the same by either."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution import search_operators
from engine.execution.gumbel import UNIFORM_BITS
from engine.execution.largest import TILE
from engine.execution.native_build import CannotBuild
from engine.execution.sampler import Sampler
from engine.execution.search_operators import check_searches, choose_searches
from engine.execution.searches import TORCH, Searches
from engine.sampling_params import SamplingParams
from tests.engine.execution.pools import native_library, native_searches
from tests.engine.execution.sampling import random_logits, row

OUT_OF_REACH = 1 << UNIFORM_BITS


@settings(max_examples=150, derandomize=True)
@given(
    num_rows=st.integers(0, 4),
    width=st.sampled_from([1, 2, 15, 16, 40, 64, 65, 1000, 5000]),
    number=st.sampled_from([1, 3, 40, 256]),
    seed=st.integers(0, 99),
    levels=st.sampled_from([None, 0.1, 1.0]),
    num_finite=st.sampled_from([0, 1, 2, 5000]),
)
def test_the_largest(
    num_rows: int, width: int, number: int, seed: int, levels: float | None, num_finite: int
) -> None:
    logits = random_logits(num_rows, width, seed)
    if levels:
        logits = (logits * levels).round()
    logits[:, num_finite:] = -torch.inf
    number = min(number, width)
    values, places = native_searches().largest(logits, number)
    assert values.tolist() == logits.topk(number).values.tolist()
    assert logits.gather(1, places).tolist() == values.tolist()
    assert all(len(set(row)) == number for row in places.tolist())


def test_of_equal_values_the_first_are_named() -> None:
    logits = torch.zeros(2, 3000)
    logits[:, 2000] = 1.0
    assert native_searches().largest(logits, 4)[1].tolist() == [[2000, 0, 1, 2]] * 2


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999, 1.0])
def test_a_row_with_nan_hurts_nobody(share: float) -> None:
    """Nothing can be put in order with NaN: a search that tried would leave its memory."""
    logits = random_logits(3, 9000)
    alone = native_searches().largest(logits[[0, 2]], 256)
    logits[1][torch.rand(9000, generator=torch.Generator().manual_seed(1)) < share] = torch.nan
    values, places = native_searches().largest(logits, 256)
    assert torch.equal(values[[0, 2]], alone[0])
    assert torch.equal(places[[0, 2]], alone[1])
    assert bool(((places >= 0) & (places < 9000)).all())


def test_a_search_does_not_depend_on_the_threads() -> None:
    logits = random_logits(9, 20_000)
    alone = native_searches().largest(logits, 256)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = native_searches().largest(logits, 256)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("searches", [TORCH, native_searches()], ids=["torch", "native"])
def test_rows_that_lie_apart_and_other_types(searches: Searches) -> None:
    logits = random_logits(2000, 6).T
    assert torch.equal(searches.largest(logits, 5)[0], logits.topk(5).values)
    assert torch.equal(searches.largest(logits.double(), 5)[0], logits.double().topk(5).values)


@settings(max_examples=60, derandomize=True)
@given(
    num_rows=st.integers(0, 5),
    num_tiles=st.sampled_from([1, 2, 30]),
    reach=st.sampled_from([0.0, 0.5, 0.99, 0.999, 1.0]),
    share_out_of_reach=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_tokens_that_pass_by_hash(
    num_rows: int, num_tiles: int, reach: float, share_out_of_reach: float, seed: int
) -> None:
    """All pass where the bound is 0: far more than there is room for at first."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator).int()
    least = torch.full((num_rows, num_tiles), int(OUT_OF_REACH * reach), dtype=torch.int32)
    least[torch.rand(least.shape, generator=generator) < share_out_of_reach] = OUT_OF_REACH
    found = native_searches().pass_by_hash(keys, least)
    assert torch.equal(found, TORCH.pass_by_hash(keys, least))
    if reach == 0:
        assert len(found) == int((least == 0).sum()) * TILE


@settings(max_examples=60, derandomize=True)
@given(
    params=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.1, 1.0, 50.0]),
            top_k=st.sampled_from([0, 1, 40, 300]),
            top_p=st.sampled_from([0.1, 0.9, 1.0]),
            min_p=st.sampled_from([0.0, 0.1]),
            seed=st.integers(0, 2**63),
        ),
        min_size=1,
        max_size=6,
    ),
    flatness=st.sampled_from([0.0, 1.0, 6.0]),
    levels=st.sampled_from([None, 2]),
)
def test_the_draw_is_the_same(params: list[SamplingParams], flatness: float, levels: int | None) -> None:
    logits = random_logits(len(params), 7000, scale=flatness)
    if levels:
        logits = (logits * levels).round() / levels
    items = tuple(row(one, index) for index, one in enumerate(params))
    assert Sampler(native_searches()).sample(logits, items) == Sampler(TORCH).sample(logits, items)


def test_a_search_that_finds_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = native_searches()
    check_searches(native)
    wrong = [
        Searches(lambda rows, number: TORCH.largest(-rows, number), native.pass_by_hash),
        Searches(
            lambda rows, n: (native.largest(rows, n)[0], native.largest(rows, n)[1] // 2), TORCH.pass_by_hash
        ),
        Searches(native.largest, lambda keys, least: native.pass_by_hash(keys, least + 1)),
    ]
    for one in wrong:
        with pytest.raises(CannotBuild, match="disagrees"):
            check_searches(one)
    monkeypatch.setattr(search_operators.SearchOperators, "searches", lambda self: wrong[0])
    with caplog.at_level(logging.WARNING):
        assert choose_searches(native_library()) is TORCH
    assert "disagrees" in caplog.text


def test_without_a_library_torch_searches() -> None:
    assert choose_searches(CannotBuild("no compiler")) is TORCH
    assert choose_searches(native_library()) is not TORCH
