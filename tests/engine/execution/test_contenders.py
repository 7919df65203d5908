"""Drawing from the contenders draws as from all, bit for bit, and looks at few."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution import contenders as file
from engine.execution.contenders import SLACK, contenders
from engine.execution.draw import draw_from_contenders, draw_with_all_noise
from engine.execution.gumbel import (
    UNIFORM_BITS,
    gumbel_noise,
    hash_tokens,
    least_uniform,
    uniform_bits,
)
from engine.execution.largest import TILE
from tests.engine.execution.sampling import keys_of as keys_of_draws
from tests.engine.execution.sampling import random_logits

NOTHING = -torch.inf


def keys_of(num_rows: int, index: int = 0) -> torch.Tensor:
    return keys_of_draws(*((seed, index) for seed in range(num_rows)))


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.amax(-1, keepdim=True)


@settings(max_examples=300, derandomize=True)
@given(
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 2, 7, 255, 256, 257, 511, 1500]),
    scale=st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3.0, 10.0, 1e4, 1e30]),
    levels=st.sampled_from([None, 1, 4]),
    share_impossible=st.sampled_from([0.0, 0.5, 0.99]),
    lowest=st.sampled_from([NOTHING, -20.0, -2.0, -0.5, 0.0]),
    seed=st.integers(0, 2**31),
)
def test_draws_as_from_all(
    num_rows: int,
    vocab_size: int,
    scale: float,
    levels: int | None,
    share_impossible: float,
    lowest: float,
    seed: int,
) -> None:
    """With `levels`, logits have few distinct values."""
    logits = random_logits(num_rows, vocab_size, seed)
    if levels is not None:
        logits = (logits * levels).round() / levels
    generator = torch.Generator().manual_seed(seed)
    logits[torch.rand(logits.shape, generator=generator) < share_impossible] = NOTHING
    logits[:, seed % vocab_size] = 0.5
    args = (shifted(logits * scale), torch.full((num_rows,), lowest), keys_of(num_rows, seed))
    assert torch.equal(draw_from_contenders(*args), draw_with_all_noise(*args))


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 3.0])
def test_draws_as_from_all_of_a_large_vocabulary(scale: float) -> None:
    """Where all logits are equal, two of so many tokens often have the same noise, and the first wins."""
    logits = shifted(random_logits(1, 50_001, scale=scale)).expand(40, -1)
    for index in range(5):
        args = (logits, torch.full((40,), NOTHING), keys_of(40, index))
        assert torch.equal(draw_from_contenders(*args), draw_with_all_noise(*args))


def test_of_equal_sums_the_first_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_for_all(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.full_like(token_ids ^ keys[:, :1], 12345)

    monkeypatch.setattr("engine.execution.gumbel.hash_tokens", same_for_all)
    monkeypatch.setattr(file, "hash_tokens", same_for_all)
    logits = torch.full((2, 1000), -1.0)
    logits[0, [300, 301, 999]] = 0.0
    logits[1, [5, 700]] = 0.0
    args = (logits, torch.full((2,), NOTHING), keys_of(2))
    assert draw_from_contenders(*args).tolist() == draw_with_all_noise(*args).tolist() == [300, 5]


def test_a_rows_contenders_do_not_depend_on_its_mates() -> None:
    logits = shifted(random_logits(6, 3000))
    logits[3] = torch.nan
    logits[4] = NOTHING
    lowest = torch.full((6,), NOTHING)
    rows, token_ids = contenders(logits, lowest, keys_of(6))
    for row in (0, 1, 2, 5):
        alone = contenders(logits[row : row + 1], lowest[:1], keys_of(6)[row : row + 1])[1]
        assert torch.equal(token_ids[rows == row], alone)


@pytest.mark.parametrize("tiles_at_once", [1, 3, 10_000])
def test_hashes_may_be_made_in_any_portions(tiles_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (shifted(random_logits(7, 2000)), torch.full((7,), NOTHING), keys_of(7))
    right = contenders(*args)
    monkeypatch.setattr(file, "TILES_AT_ONCE", tiles_at_once)
    found = contenders(*args)
    assert torch.equal(found[0], right[0])
    assert torch.equal(found[1], right[1])


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0, 10.0])
def test_contenders_are_few(scale: float) -> None:
    logits = shifted(random_logits(20, 50_000, scale=scale))
    rows, _ = contenders(logits, torch.full((20,), NOTHING), keys_of(20))
    assert 20 <= len(rows) < 20 * 2500


def test_what_is_below_the_threshold_is_no_contender() -> None:
    logits = torch.full((1, 20 * TILE), -3.0)
    logits[0, 5 * TILE] = 0.0
    _, token_ids = contenders(logits, torch.tensor([-1.0]), keys_of(1))
    assert set((token_ids // TILE).tolist()) == {5}


def test_the_bound_lets_every_noise_of_its_size_pass() -> None:
    """Of all that there are: the bound of a noise, less the slack, is not above what it is made of."""
    uniform = torch.arange(1 << UNIFORM_BITS)
    noise = ((uniform.float() + 0.5) * 2.0**-UNIFORM_BITS).log_().neg_().log_().neg_()
    least = least_uniform(noise.double() - SLACK / 8)
    assert bool((least <= uniform).all())
    # And it is not far below.
    assert bool((least_uniform(noise.double() + SLACK) > uniform).all())


def test_no_noise_is_as_large_as_infinity() -> None:
    ends = torch.tensor([torch.inf, 16.7, torch.nan, 16.6, -2.0, -3.0, -torch.inf], dtype=torch.float64)
    none = 1 << UNIFORM_BITS
    assert least_uniform(ends).tolist() == [none, none, none, none - 1, 5184, 0, 0]


def test_the_noise_is_made_of_what_is_compared() -> None:
    keys, token_ids = keys_of(3), torch.arange(5000, dtype=torch.int32)
    noise = gumbel_noise(keys, token_ids)
    order = noise.argsort(-1)
    bits = uniform_bits(hash_tokens(keys, token_ids)).gather(1, order)
    assert bool((bits.diff() >= 0).all())
