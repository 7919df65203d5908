"""The native operator draws what torch draws, or leaves the row undecided."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.machine.native_build import CannotBuild
from engine.execution.sampling import native_draw
from engine.execution.sampling.gumbel import gumbel_noise
from engine.execution.sampling.native_draw import (
    UNDECIDED,
    DrawOperator,
    check_draw_operator,
    choose_draw_operator,
    draw_requests,
    row_addresses,
)
from engine.execution.sampling.sampler import Sampler
from engine.execution.sampling.slot_params import SlotParams
from engine.execution.sampling.top_k import row_max
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


def requests_of(logits: torch.Tensor, items: list[ScheduledSequence]) -> native_draw.DrawRequests:
    sequences = [item.sequence for item in items]
    indices = np.array([sequence.num_output_tokens for sequence in sequences])
    max_logits, argmax = (one.numpy() for one in row_max(logits))
    params = SlotParams().of(sequences)
    return draw_requests(row_addresses(logits), max_logits, argmax, params, indices, logits.shape[1])


def drawn(logits: torch.Tensor, *params: SamplingParams) -> list[int]:
    """Drawn by the operator, without torch."""
    items = [row(one, index) for index, one in enumerate(params)]
    tokens: list[int] = draw_operator().draw(requests_of(logits, items), logits.shape[1]).tolist()
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
def test_row_max_is_the_first_maximum(
    num_rows: int, width: int, seed: int, levels: float | None, num_finite: int, nan_at: int | None
) -> None:
    logits = random_logits(num_rows, width, seed)
    if levels:
        logits = (logits * levels).round()
    logits[:, num_finite:] = -torch.inf
    if nan_at is not None:
        logits[1:, nan_at:] = torch.nan
        logits[:1, nan_at:] = torch.inf
    values, indices = draw_operator().row_max(logits)
    right = logits.max(-1)
    torch.testing.assert_close(values, right.values, rtol=0, atol=0, equal_nan=True)
    assert indices.tolist() == right.indices.tolist()


@settings(max_examples=100, derandomize=True)
@given(
    params=st.lists(any_params, min_size=1, max_size=6),
    width=st.sampled_from([1, 7, 64, 300, 7000]),
    flatness=st.sampled_from([0.0, 0.01, 1.0, 6.0, 1e4]),
    levels=st.sampled_from([None, 2]),
    share_impossible=st.sampled_from([0.0, 0.99]),
    seed=st.integers(0, 99),
)
def test_both_draw_the_same_token(
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
def test_most_draws_from_a_large_vocabulary_are_decided(flatness: float, top_p: float) -> None:
    """Even if top-p keeps thousands of tokens."""
    logits = random_logits(12, 50_001, scale=flatness)
    params = [SamplingParams(seed=seed, top_p=top_p) for seed in range(12)]
    native, by_torch = both(logits, *(row(one, index) for index, one in enumerate(params)))
    assert native == by_torch
    assert drawn(logits, *params).count(UNDECIDED) <= 4


def test_processed_and_greedy_rows_among_others() -> None:
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
    # All rows are processed: their logits are in another tensor.
    native, by_torch = both(logits, *(row(params[1]) for _ in range(5)))
    assert native == by_torch


def test_strided_rows_and_other_dtypes() -> None:
    items = [row(SamplingParams(seed=seed, top_p=0.8)) for seed in range(6)]
    logits = random_logits(2000, 6).T
    for one in (logits, logits.bfloat16(), logits.repeat(1, 2)[:, :2000]):
        native, by_torch = both(one, *items)
        assert native == by_torch


@pytest.mark.parametrize("params", [{"top_p": 0.999}, {"top_k": 2}, {}])
def test_the_first_of_two_equal_sums_in_float32_wins(params: dict[str, Any]) -> None:
    """The operator's own sums differ: in half of these rows its second token is ahead."""
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


def test_values_equal_torchs_bit_for_bit() -> None:
    """Min-p is exactly the second token's value: multiplying by 1/temperature would be off by a bit."""
    logits = torch.full((400, 300), -torch.inf)
    logits[:, 7] = 0.3
    logits[:, 200] = 0.3 - torch.linspace(0.1, 0.4, 400)
    temperatures = torch.linspace(0.3, 1.7, 400)
    items = [row(SamplingParams(seed=seed, temperature=float(temperatures[seed]))) for seed in range(400)]
    requests = requests_of(logits, items)
    requests["threshold"] = ((logits[:, 200] - logits[:, 7]) / temperatures).numpy()
    reached = draw_operator().draw(requests, 300)
    assert set(reached) == {7, 200}
    requests["threshold"] = -np.inf
    assert reached.tolist() == draw_operator().draw(requests, 300).tolist()


@pytest.mark.parametrize("params", [{}, {"top_k": 600}, {"top_p": 1 - 1e-4}, {"top_k": 40}])
@pytest.mark.parametrize(
    ("num_level", "is_decided"), [(native_draw.MAX_CANDIDATES, True), (native_draw.MAX_CANDIDATES + 1, False)]
)
def test_a_row_with_too_many_candidates_is_undecided(
    num_level: int, is_decided: bool, params: dict[str, Any]
) -> None:
    """All sums are equal except the last token's, which is slightly larger."""
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
def test_candidates_that_cannot_win_any_more_are_pruned(params: dict[str, Any]) -> None:
    """As many equal sums as there may be candidates, then one that is far ahead."""
    token_ids = torch.linspace(10, 2900, native_draw.MAX_CANDIDATES + 1).round().int()
    noises = gumbel_noise(keys_of(*((seed, 0) for seed in range(20))), token_ids)
    # Not the most likely token, where the search begins.
    seed = int((noises[:, -1] - noises.min(1).values).argmax())
    wanted = SamplingParams(seed=seed, **params)
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, token_ids.long()] = -noises[seed]
    logits[0, 2900] += 0.5
    assert int(logits.argmax()) != 2900
    assert drawn(logits, wanted) == [2900]


@pytest.mark.parametrize("nudge", [0.0, 1e-8, -1e-8])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_row_is_undecided_if_top_p_depends_on_a_rounding(nudge: float, top_k: int) -> None:
    """Two of four, or of three, equal shares are exactly p, so rounding decides about the next token."""
    num = top_k or 4
    logits = torch.full((1, 500), -80.0)
    logits[0, :num] = torch.tensor([0.0, -1e-6, -2e-6, -3e-6])[:num]
    params = SamplingParams(seed=1, top_p=2 / num + nudge, top_k=top_k)
    assert drawn(logits, params) == [UNDECIDED]
    native, by_torch = both(logits, row(params))
    assert native == by_torch
    assert drawn(logits, dataclasses.replace(params, top_p=2 / num + 0.01)) != [UNDECIDED]


def test_top_p_keeps_the_tokens_preceded_by_less_than_p() -> None:
    """Shares of a half, a quarter, and so on. Kept tokens are those that are ever drawn."""
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, :40] = -torch.arange(40) * float(np.log(2))
    for top_p, num_kept in [(0.4, 1), (0.51, 2), (0.76, 3), (0.99, 7)]:
        params = [SamplingParams(seed=seed, top_p=top_p) for seed in range(2000)]
        assert set(drawn(logits.expand(2000, -1).contiguous(), *params)) == set(range(num_kept))


def test_all_tokens_of_a_slope_that_top_p_keeps_are_drawn() -> None:
    """Neighbours fall into the same bucket of the filter, and none is lost between buckets."""
    logits = torch.full((1, 600), -4.0)
    logits[0, :60] = torch.linspace(0.0, -0.5, 60)
    items = [row(SamplingParams(seed=seed, top_k=120, top_p=0.7)) for seed in range(1500)]
    native, by_torch = both(logits.expand(1500, -1), *items)
    assert native == by_torch
    tokens = {one.token_id for one in native}
    assert tokens == set(range(len(tokens)))
    assert 30 < len(tokens) < 50


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.99}, {"top_k": 700}])
def test_tokens_below_min_p_are_never_drawn(params: dict[str, Any]) -> None:
    logits = torch.linspace(0.0, -4.0, 1000).expand(500, -1)
    items = [row(SamplingParams(seed=seed, min_p=0.97, **params)) for seed in range(500)]
    native, by_torch = both(logits, *items)
    assert native == by_torch
    assert {one.token_id for one in native} == set(range(8))


def test_a_row_with_nan_does_not_affect_others() -> None:
    logits = random_logits(3, 9000)
    params = [SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=2, top_p=0.5), SamplingParams(seed=3)]
    whole = [drawn(logits[[at]], params[at]) for at in (0, 2)]
    logits[1, 4000:] = torch.nan
    items = [row(one) for one in params]
    found = draw_operator().draw(requests_of(logits, items), 9000)
    assert 0 <= found[1] < 9000
    assert drawn(logits[[0]], params[0]) == whole[0]
    native, by_torch = both(logits, *items)
    assert native == by_torch
    assert native[1].error is not None


def test_a_draw_does_not_depend_on_the_batch_or_the_threads() -> None:
    logits = random_logits(9, 20_000)
    params = [SamplingParams(seed=seed, top_p=0.9, top_k=50 * (seed % 2)) for seed in range(9)]
    items = [row(one) for one in params]
    requests = requests_of(logits, items)
    alone = [draw_operator().draw(requests[[at]], 20_000)[0] for at in range(9)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert draw_operator().draw(requests, 20_000).tolist() == alone
        assert all(map(torch.equal, draw_operator().row_max(logits), row_max(logits)))
    finally:
        torch.set_num_threads(before)


def test_an_operator_that_fails_its_self_check_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator = draw_operator()
    check_draw_operator(operator)

    class Off(DrawOperator):
        def draw(self, requests: native_draw.DrawRequests, vocab_size: int) -> Any:
            tokens = operator.draw(requests, vocab_size)
            tokens[7] += 1
            return tokens

    class Unsure(DrawOperator):
        def draw(self, requests: native_draw.DrawRequests, vocab_size: int) -> Any:
            return np.full_like(operator.draw(requests, vocab_size), UNDECIDED)

    class Smallest(DrawOperator):
        def row_max(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return operator.row_max(-rows)

    for wrong in (Off, Unsure, Smallest):
        with pytest.raises(CannotBuild, match="disagrees"):
            check_draw_operator(wrong(native_library()))
    monkeypatch.setattr(native_draw, "DrawOperator", Off)
    with caplog.at_level(logging.WARNING):
        assert choose_draw_operator(native_library()) is None
    assert "disagrees" in caplog.text


def test_without_a_library_torch_draws() -> None:
    assert choose_draw_operator(CannotBuild("no compiler")) is None
    assert choose_draw_operator(native_library()) is not None
