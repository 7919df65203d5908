"""The native operator draws what torch draws, or says that it cannot tell."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.machine.native_build import CannotBuild
from engine.execution.sampling import native_draw as file
from engine.execution.sampling.gumbel import gumbel_noise
from engine.execution.sampling.native_draw import (
    UNDECIDED,
    DrawOperator,
    ask,
    check_draw_operator,
    choose_draw_operator,
    row_addresses,
)
from engine.execution.sampling.sampler import Sampler
from engine.execution.sampling.slot_params import SlotParams
from engine.execution.sampling.top_k import first_largest
from engine.outputs import ScheduledSequence
from engine.sampling_params import SamplingParams
from tests.engine.execution.pools import draw_operator, native_library
from tests.engine.execution.sampling.bench import keys_of, random_logits, row

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.1, 0.7, 1.0, 50.0, 1e30]),
    top_k=st.sampled_from([0, 1, 40, 300, 2500]),
    top_p=st.sampled_from([1e-9, 0.1, 0.9, 0.999, 1 - 1e-9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**63),
)


def asked_of(logits: torch.Tensor, items: list[ScheduledSequence]) -> file.Asked:
    sequences = [item.sequence for item in items]
    indices = np.array([sequence.num_output_tokens for sequence in sequences])
    largest, places = (one.numpy() for one in first_largest(logits))
    params = SlotParams().of(sequences)
    return ask(row_addresses(logits), largest, places, params, indices, logits.shape[1])


def drawn(logits: torch.Tensor, *params: SamplingParams) -> list[int]:
    """By the operator alone."""
    items = [row(one, index) for index, one in enumerate(params)]
    tokens: list[int] = draw_operator().draw(asked_of(logits, items), logits.shape[1]).tolist()
    return tokens


def both(logits: torch.Tensor, *items: ScheduledSequence) -> tuple[Any, Any]:
    return Sampler(draw_operator()).sample(logits, items), Sampler().sample(logits, items)


@settings(max_examples=80, derandomize=True)
@given(
    num_rows=st.integers(0, 4),
    width=st.sampled_from([1, 2, 15, 63, 64, 65, 1000, 5000]),
    seed=st.integers(0, 99),
    levels=st.sampled_from([None, 0.1, 1.0]),
    num_finite=st.sampled_from([0, 1, 2, 5000]),
    nan_at=st.sampled_from([None, 0, 1, 7, 63, 64, 4999]),
)
def test_the_first_of_the_largest(
    num_rows: int, width: int, seed: int, levels: float | None, num_finite: int, nan_at: int | None
) -> None:
    logits = random_logits(num_rows, width, seed)
    if levels:
        logits = (logits * levels).round()
    logits[:, num_finite:] = -torch.inf
    if nan_at is not None:
        logits[1:, nan_at:] = torch.nan
        logits[:1, nan_at:] = torch.inf
    values, places = draw_operator().first_largest(logits)
    right = logits.max(-1)
    torch.testing.assert_close(values, right.values, rtol=0, atol=0, equal_nan=True)
    assert places.tolist() == right.indices.tolist()


@settings(max_examples=100, derandomize=True)
@given(
    params=st.lists(any_params, min_size=1, max_size=6),
    width=st.sampled_from([1, 7, 64, 300, 7000]),
    flatness=st.sampled_from([0.0, 0.01, 1.0, 6.0, 1e4]),
    levels=st.sampled_from([None, 2]),
    share_impossible=st.sampled_from([0.0, 0.99]),
    seed=st.integers(0, 99),
)
def test_the_draw_is_the_same(
    params: list[SamplingParams],
    width: int,
    flatness: float,
    levels: int | None,
    share_impossible: float,
    seed: int,
) -> None:
    logits = random_logits(len(params), width, seed, scale=flatness)
    if levels:
        logits = (logits * levels).round() / levels
    generator = torch.Generator().manual_seed(seed)
    logits[torch.rand(logits.shape, generator=generator) < share_impossible] = -torch.inf
    logits[:, seed % width] = 0.5
    native, by_torch = both(logits, *(row(one, index) for index, one in enumerate(params)))
    assert native == by_torch


@pytest.mark.parametrize(("flatness", "top_p"), [(3.0, 0.9), (1.0, 0.5), (5.0, 0.99), (3.0, 1.0)])
def test_the_draw_from_a_large_vocabulary_is_the_same_and_mostly_decided(
    flatness: float, top_p: float
) -> None:
    """Also where the tokens that top-p keeps are thousands."""
    logits = random_logits(12, 50_001, scale=flatness)
    params = [SamplingParams(seed=seed, top_p=top_p) for seed in range(12)]
    native, by_torch = both(logits, *(row(one, index) for index, one in enumerate(params)))
    assert native == by_torch
    assert drawn(logits, *params).count(UNDECIDED) <= 4


def test_edited_and_greedy_rows_among_others() -> None:
    params = [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2, top_p=0.9, logit_bias={5: 30.0}),
        SamplingParams(temperature=0.0, logit_bias={6: 30.0}),
        SamplingParams(seed=3, logit_bias={7: 30.0}),
        SamplingParams(seed=4, top_k=3),
    ]
    logits = random_logits(5, 3000)
    native, by_torch = both(logits, *map(row, params))
    assert native == by_torch
    assert [native[at].token_id for at in (1, 2, 3)] == [5, 6, 7]
    # All rows edited: their logits lie in another place.
    native, by_torch = both(logits, *(row(params[1]) for _ in range(5)))
    assert native == by_torch


def test_rows_that_lie_apart_and_other_types() -> None:
    items = [row(SamplingParams(seed=seed, top_p=0.8)) for seed in range(6)]
    logits = random_logits(2000, 6).T
    for one in (logits, logits.bfloat16(), logits.repeat(1, 2)[:, :2000]):
        native, by_torch = both(one, *items)
        assert native == by_torch


@pytest.mark.parametrize("params", [{"top_p": 0.999}, {"top_k": 2}, {}])
def test_of_two_sums_that_are_equal_in_float32_the_first_wins(params: dict[str, Any]) -> None:
    """The operator's sums are not those: in half of these rows its second token is ahead."""
    items = [row(SamplingParams(seed=seed, **params)) for seed in range(64)]
    first, second = gumbel_noise(keys_of(*((seed, 0) for seed in range(64))), torch.tensor([10, 900]).int()).T
    logits = torch.full((64, 1000), -torch.inf)
    logits[:, 10] = (second - first).clamp(max=0)
    logits[:, 900] = (first - second).clamp(max=0)
    is_tied = logits[:, 10] + first == logits[:, 900] + second
    assert int(is_tied.sum()) > 32
    native, by_torch = both(logits, *items)
    assert native == by_torch
    assert {native[at].token_id for at in is_tied.nonzero()[:, 0].tolist()} == {10}


def test_values_are_torchs_bit_for_bit() -> None:
    """Min-p at just what each row's second token has: a product with 1/temperature would be off by a bit."""
    logits = torch.full((400, 300), -torch.inf)
    logits[:, 7] = 0.3
    logits[:, 200] = 0.3 - torch.linspace(0.1, 0.4, 400)
    temperatures = torch.linspace(0.3, 1.7, 400)
    items = [row(SamplingParams(seed=seed, temperature=float(temperatures[seed]))) for seed in range(400)]
    asked = asked_of(logits, items)
    asked["lowest"] = ((logits[:, 200] - logits[:, 7]) / temperatures).numpy()
    reached = draw_operator().draw(asked, 300)
    assert set(reached) == {7, 200}
    asked["lowest"] = -np.inf
    assert reached.tolist() == draw_operator().draw(asked, 300).tolist()


@pytest.mark.parametrize("params", [{}, {"top_k": 600}, {"top_p": 1 - 1e-4}, {"top_k": 40}])
@pytest.mark.parametrize(("num_level", "is_decided"), [(file.ROOM, True), (file.ROOM + 1, False)])
def test_more_tokens_than_can_be_named_are_told(
    num_level: int, is_decided: bool, params: dict[str, Any]
) -> None:
    """So many sums are level but for the last token's, which is a little ahead and far behind the others."""
    wanted = SamplingParams(seed=3, **params)
    token_ids = torch.linspace(10, 2900, num_level).round().int()
    noise = gumbel_noise(keys_of((3, 0)), token_ids)[0]
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, token_ids.long()] = noise.min() - noise
    logits[0, 2900] += 1e-4
    assert (drawn(logits, wanted) != [UNDECIDED]) == is_decided
    native, by_torch = both(logits, row(wanted))
    assert native == by_torch
    assert native[0].token_id == 2900


@pytest.mark.parametrize("params", [{}, {"top_k": 100}])
def test_tokens_that_are_passed_make_room(params: dict[str, Any]) -> None:
    """As many level sums as can be named, then one that is far ahead of them."""
    token_ids = torch.linspace(10, 2900, file.ROOM + 1).round().int()
    noises = gumbel_noise(keys_of(*((seed, 0) for seed in range(20))), token_ids)
    # Not the likeliest, at which the search begins.
    seed = int((noises[:, -1] - noises.min(1).values).argmax())
    wanted = SamplingParams(seed=seed, **params)
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, token_ids.long()] = -noises[seed]
    logits[0, 2900] += 0.5
    assert int(logits.argmax()) != 2900
    assert drawn(logits, wanted) == [2900]


@pytest.mark.parametrize("nudge", [0.0, 1e-8, -1e-8])
@pytest.mark.parametrize("top_k", [0, 3])
def test_where_top_p_hangs_on_a_rounding_torch_is_asked(nudge: float, top_k: int) -> None:
    """Two of four equal shares, or of three, are just what top-p wants: the next one stays by rounding."""
    num = top_k or 4
    logits = torch.full((1, 500), -80.0)
    logits[0, :num] = torch.tensor([0.0, -1e-6, -2e-6, -3e-6])[:num]
    params = SamplingParams(seed=1, top_p=2 / num + nudge, top_k=top_k)
    assert drawn(logits, params) == [UNDECIDED]
    native, by_torch = both(logits, row(params))
    assert native == by_torch
    assert drawn(logits, dataclasses.replace(params, top_p=2 / num + 0.01)) != [UNDECIDED]


def test_top_p_keeps_exactly_the_tokens_before_which_less_than_p_stands() -> None:
    """Shares of a half, a quarter, and so on: what is kept is told by which tokens are ever drawn."""
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, :40] = -torch.arange(40) * float(np.log(2))
    for top_p, num_kept in [(0.4, 1), (0.51, 2), (0.76, 3), (0.99, 7)]:
        params = [SamplingParams(seed=seed, top_p=top_p) for seed in range(2000)]
        assert set(drawn(logits.expand(2000, -1).contiguous(), *params)) == set(range(num_kept))


def test_of_a_slope_of_tokens_all_that_top_p_keeps_are_drawn() -> None:
    """Neighbours differ by less than the filter tells apart at first, and none is lost between its parts."""
    logits = torch.full((1, 600), -4.0)
    logits[0, :60] = torch.linspace(0.0, -0.5, 60)
    items = [row(SamplingParams(seed=seed, top_k=120, top_p=0.7)) for seed in range(1500)]
    native, by_torch = both(logits.expand(1500, -1), *items)
    assert native == by_torch
    tokens = {one.token_id for one in native}
    assert tokens == set(range(len(tokens)))
    assert 30 < len(tokens) < 50


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.99}, {"top_k": 700}])
def test_what_min_p_leaves_out_is_never_drawn(params: dict[str, Any]) -> None:
    logits = torch.linspace(0.0, -4.0, 1000).expand(500, -1)
    items = [row(SamplingParams(seed=seed, min_p=0.97, **params)) for seed in range(500)]
    native, by_torch = both(logits, *items)
    assert native == by_torch
    assert {one.token_id for one in native} == set(range(8))


def test_a_row_with_nan_hurts_nobody() -> None:
    logits = random_logits(3, 9000)
    params = [SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=2, top_p=0.5), SamplingParams(seed=3)]
    whole = [drawn(logits[[at]], params[at]) for at in (0, 2)]
    logits[1, 4000:] = torch.nan
    items = [row(one) for one in params]
    found = draw_operator().draw(asked_of(logits, items), 9000)
    assert 0 <= found[1] < 9000
    assert drawn(logits[[0]], params[0]) == whole[0]
    native, by_torch = both(logits, *items)
    assert native == by_torch
    assert native[1].error is not None


def test_a_draw_does_not_depend_on_its_mates_or_the_threads() -> None:
    logits = random_logits(9, 20_000)
    params = [SamplingParams(seed=seed, top_p=0.9, top_k=50 * (seed % 2)) for seed in range(9)]
    items = [row(one) for one in params]
    asked = asked_of(logits, items)
    alone = [draw_operator().draw(asked[[at]], 20_000)[0] for at in range(9)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert draw_operator().draw(asked, 20_000).tolist() == alone
        assert all(map(torch.equal, draw_operator().first_largest(logits), first_largest(logits)))
    finally:
        torch.set_num_threads(before)


def test_an_operator_that_draws_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator = draw_operator()
    check_draw_operator(operator)

    class Off(DrawOperator):
        def draw(self, asked: file.Asked, vocab_size: int) -> Any:
            tokens = operator.draw(asked, vocab_size)
            tokens[7] += 1
            return tokens

    class Unsure(DrawOperator):
        def draw(self, asked: file.Asked, vocab_size: int) -> Any:
            return np.full_like(operator.draw(asked, vocab_size), UNDECIDED)

    class Smallest(DrawOperator):
        def first_largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return operator.first_largest(-rows)

    for wrong in (Off, Unsure, Smallest):
        with pytest.raises(CannotBuild, match="disagrees"):
            check_draw_operator(wrong(native_library()))
    monkeypatch.setattr(file, "DrawOperator", Off)
    with caplog.at_level(logging.WARNING):
        assert choose_draw_operator(native_library()) is None
    assert "disagrees" in caplog.text


def test_without_a_library_torch_draws() -> None:
    assert choose_draw_operator(CannotBuild("no compiler")) is None
    assert choose_draw_operator(native_library()) is not None
