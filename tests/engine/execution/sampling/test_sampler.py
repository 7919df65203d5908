"""The draw equals a naive one and depends on nothing else."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import DeviceLost
from engine.execution.sampling.sampler import Sampler
from engine.outputs import SampledToken, ScheduledSequence
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.sampling.bench import naive_draw, naive_kept, random_logits, row, sample

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 256, 257, 300, 5000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@settings(max_examples=100, derandomize=True)
@given(
    requests=st.lists(st.tuples(any_params, st.integers(0, 50)), min_size=1, max_size=6),
    vocab_size=st.sampled_from([2, 50, 256, 257, 700]),
    flatness=st.sampled_from([0.01, 1.0, 4.0]),
    levels=st.sampled_from([None, 2, 6]),
)
def test_equals_a_naive_draw(
    requests: list[tuple[SamplingParams, int]], vocab_size: int, flatness: float, levels: int | None
) -> None:
    """vllm#5639, vllm-metal#646: each row of a batch is filtered by its own request's parameters.

    With `levels`, logits have few distinct values, so that every threshold has ties.
    """
    logits = random_logits(len(requests), vocab_size, seed=vocab_size, scale=flatness)
    if levels is not None:
        logits = (logits * levels / flatness / 2).round() * flatness / levels
    found = sample(logits, *(row(params, index) for params, index in requests))
    right = [naive_draw(one, params, index) for one, (params, index) in zip(logits, requests, strict=True)]
    assert found == right


@pytest.mark.parametrize(
    ("num_ahead", "params"),
    [
        # All values that top-k keeps tie, and exceed the window.
        (0, {"top_k": 5}),
        (0, {"top_p": 0.2}),
        (0, {"top_k": 5, "top_p": 0.2}),
        # The k-th value ties with many outside the window, whose mass counts for top-p.
        (100, {"top_k": 150, "top_p": 0.4}),
        (100, {"top_k": 150, "top_p": 0.1}),
        (100, {"top_k": 256}),
        (255, {"top_k": 255}),
        (256, {"top_k": 256, "top_p": 0.5}),
    ],
)
def test_ties_across_the_edge_of_the_window(num_ahead: int, params: dict[str, Any]) -> None:
    logits = torch.full((700,), -1.5)
    logits[torch.randperm(700, generator=torch.Generator().manual_seed(2))[:num_ahead]] = torch.linspace(
        0.0, -1.0, num_ahead
    )
    requests = [SamplingParams(**params, seed=seed) for seed in range(60)]
    found = sample(logits.expand(60, -1), *map(row, requests))
    assert found == [naive_draw(logits, request, 0) for request in requests]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.4, top_k=6, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("vocab_size", [12, 400])
def test_frequencies_follow_the_softmax(params: SamplingParams, vocab_size: int) -> None:
    logits = torch.full((vocab_size,), -12.0)
    logits[-12:] = random_logits(1, 12, seed=3, scale=1.2)[0]
    num_draws = 6000
    items = [
        row(SamplingParams(**{**fields(params), "seed": seed}), index)
        for seed, index in ((draw // 3, draw % 3) for draw in range(num_draws))
    ]
    found = torch.tensor(sample(logits.expand(num_draws, -1), *items))
    counts = torch.bincount(found, minlength=vocab_size).double()
    kept = sorted(naive_kept(logits.tolist(), params))
    right = torch.zeros(vocab_size, dtype=torch.float64)
    right[kept] = (logits[kept].double() / params.temperature).softmax(-1)
    assert set(counts.nonzero()[:, 0].tolist()) <= set(kept)
    # Chi-square over the tokens expected at least five times: mean n - 1, standard deviation sqrt(2 n).
    often = right * num_draws >= 5
    chi_square = float(((counts - right * num_draws) ** 2 / (right * num_draws))[often].sum())
    degrees = int(often.sum())
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def test_the_first_of_equal_sums_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_for_all(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.full_like(token_ids ^ keys[:, :1], 12345)

    monkeypatch.setattr("engine.execution.sampling.gumbel.hash_tokens", same_for_all)
    logits = torch.full((2, 50_001), -1.0)
    logits[0, [300, 301, 999]] = 0.0
    logits[1, [5, 700]] = 0.0
    assert sample(logits, row(SamplingParams(seed=0)), row(SamplingParams(seed=1))) == [300, 5]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """vllm#51226, vllm#17524: a seeded request changed with the seeds and the order of the batch."""
    logits = random_logits(5, 1000)
    mine = row(SamplingParams(seed=42, temperature=0.8, top_p=0.95), 3)
    alone = sample(logits[:1], mine)
    others = [
        row(SamplingParams(seed=1)),
        row(SamplingParams(temperature=0.0)),
        row(SamplingParams(temperature=3.0, top_p=0.999)),
        row(SamplingParams(top_k=300)),
    ]
    for index in range(5):
        items = [*others[:index], mine, *others[index:]]
        order = [*range(1, index + 1), 0, *range(index + 1, 5)]
        assert sample(logits[order], *items)[index] == alone[0]
    assert sample(logits[[0, 0]], mine, mine) == alone * 2


def test_draws_differ_by_seed_and_index() -> None:
    logits = torch.zeros(1, 1000)
    by_seed = {sample(logits, row(SamplingParams(seed=seed)))[0] for seed in range(-20, 20)}
    by_index = {sample(logits, row(SamplingParams(seed=7), index))[0] for index in range(40)}
    assert len(by_seed) > 35
    assert len(by_index) > 35


def test_greedy_rows_do_not_change_with_sampled_ones() -> None:
    logits = random_logits(4, 500)
    greedy, random = row(SamplingParams(temperature=0.0)), row(SamplingParams(temperature=5.0, seed=9))
    found = sample(logits, greedy, random, greedy, random)
    right = logits.argmax(-1).tolist()
    assert (found[0], found[2]) == (right[0], right[2])


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-5, 9.9e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """vllm#45116: a temperature of 1e-5 overflowed and killed the engine."""
    logits = random_logits(1, 300, scale=1e6)
    assert sample(logits, row(SamplingParams(temperature=temperature, seed=5))) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [1e-4, 1e30, 1e308])
def test_extreme_temperatures_draw_a_token(temperature: float) -> None:
    logits = random_logits(1, 300, scale=1e30)
    logits[0, :100] = -torch.inf
    (token,) = sample(logits, row(SamplingParams(temperature=temperature, seed=5)))
    assert token is not None
    assert token >= 100


def test_a_top_k_beyond_the_vocabulary_is_off() -> None:
    """sglang#28153: a top-k larger than the vocabulary killed the engine."""
    logits = random_logits(1, 300)
    with_k = [sample(logits, row(SamplingParams(top_k=9_999_999, seed=seed))) for seed in range(20)]
    assert with_k == [sample(logits, row(SamplingParams(seed=seed))) for seed in range(20)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=280, top_p=0.5, min_p=0.5),
    ],
)
@pytest.mark.parametrize("vocab_size", [100, 400])
def test_only_a_row_that_is_not_finite_fails(bad: float, params: SamplingParams, vocab_size: int) -> None:
    """vllm#45116, sglang#40099: NaN in one request's logits failed the whole batch."""
    logits = random_logits(3, vocab_size)
    alone = sample(logits[[0, 2]], row(params, 1), row(params, 2))
    logits[1, 50] = bad
    tokens = Sampler().sample(logits, (row(params, 1), row(params), row(params, 2)))
    assert tokens[1] == SampledToken(None, "the model computed non-finite logits")
    assert [tokens[0].token_id, tokens[2].token_id] == alone


def test_a_row_without_an_allowed_token_fails() -> None:
    assert Sampler().sample(torch.full((1, 10), -torch.inf), (row(SamplingParams()),))[0].error


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [17, 444]] = 0.0
    params = [SamplingParams(seed=s, top_k=k) for s in range(20) for k in (0, 5, 300)]
    found = sample(logits.expand(len(params), -1), *map(row, params))
    assert set(found) == {17, 444}


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = random_logits(4, 500).bfloat16()
    items = [row(SamplingParams(seed=seed, top_p=0.9)) for seed in range(4)]
    assert sample(logits, *items) == sample(logits.float(), *items)


def test_the_global_random_state_does_not_change() -> None:
    before = torch.random.get_rng_state()
    sample(random_logits(1, 500), row(SamplingParams()))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_empty_batch_gives_no_tokens() -> None:
    item = ScheduledSequence(Sequence("r", [1, 2], SamplingParams(), arrival_time=0.0), 0, 2, 2, False)
    assert Sampler().sample(torch.empty(0, 10), (item,)) == []


def test_a_device_lost_while_sampling() -> None:
    class Lost:
        device = torch.device("cpu")

        def __len__(self) -> int:
            return 1

        def __getitem__(self, rows: slice) -> "Lost":
            return self

        def float(self) -> torch.Tensor:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(DeviceLost):
        Sampler().sample(Lost(), (row(SamplingParams()),))  # type: ignore[arg-type]  # takes the place of a tensor
