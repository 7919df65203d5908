"""The noise is a pure function whose bits never change."""

import math

import pytest
import torch

from engine.execution.sampling.gumbel import gumbel_noise, hash_tokens, uniform_bits
from tests.engine.execution.sampling.bench import keys_of

DRAWS = [(0, 0), (1, 0), (0, 1), (-1, 5), (2**64 - 1, 5), (-(2**63), 2**20), (2**63, 7), (42, 1000)]
PINNED_KEYS = [0xA706DD2F4D197E6F, 0x5E41AB087439611E, 0x2A98F501AF37E97F]
PINNED_HASHES = [0xDCFDBF28, 0x77330FBF, 0xEA378EC8]


def splitmix_in_python(state: int) -> int:
    mixed = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def row_key(seed: int, index: int) -> int:
    return splitmix_in_python((splitmix_in_python(seed % 2**64) + index) % 2**64)


def hash_in_python(key: int, token_id: int) -> int:
    low, high = key & 0xFFFFFFFF, key >> 32
    mixed = token_id ^ low
    mixed ^= mixed >> 16
    mixed = mixed * 0x85EBCA6B & 0xFFFFFFFF
    mixed ^= high
    mixed ^= mixed >> 13
    mixed = mixed * 0xC2B2AE35 & 0xFFFFFFFF
    return mixed ^ mixed >> 16


def test_the_bits_are_those_of_plain_integers() -> None:
    token_ids = torch.tensor([0, 1, 2, 1000, 151_935, 2**31 - 1], dtype=torch.int32)
    found = hash_tokens(keys_of(*DRAWS), token_ids)
    assert found.dtype == torch.int32
    right = [[hash_in_python(row_key(*draw), token) for token in token_ids.tolist()] for draw in DRAWS]
    assert (found.long() & 0xFFFFFFFF).tolist() == right


def test_the_bits_are_pinned() -> None:
    """A change of these would change the text of every seeded request that is resumed or sent again."""
    assert [row_key(*draw) for draw in DRAWS[:3]] == PINNED_KEYS
    assert [hash_in_python(row_key(42, 7), token) for token in (0, 1, 49_151)] == PINNED_HASHES


def test_token_ids_may_differ_by_row() -> None:
    keys = keys_of(*DRAWS)
    token_ids = torch.arange(len(DRAWS) * 5, dtype=torch.int32).view(len(DRAWS), 5)
    whole = hash_tokens(keys, torch.arange(len(DRAWS) * 5, dtype=torch.int32))
    rows = hash_tokens(keys, token_ids)
    for row in range(len(DRAWS)):
        assert torch.equal(rows[row], whole[row, row * 5 : row * 5 + 5])


def test_the_keys_are_those_of_plain_integers() -> None:
    keys = [low % 2**32 | high % 2**32 << 32 for low, high in keys_of(*DRAWS).tolist()]
    assert keys == [row_key(*draw) for draw in DRAWS]


def test_a_negative_seed_is_the_same_64_bits() -> None:
    assert torch.equal(keys_of((-1, 3)), keys_of((2**64 - 1, 3)))


def test_neighbouring_keys_are_uncorrelated() -> None:
    keys = keys_of(*((seed, index) for seed in range(100) for index in range(100)))
    assert len(set(map(tuple, keys.tolist()))) == 10_000


@pytest.mark.parametrize("draws", [[(seed, 0) for seed in range(64)], [(7, index) for index in range(64)]])
def test_the_noise_is_gumbels(draws: list[tuple[int, int]]) -> None:
    noise = gumbel_noise(keys_of(*draws), torch.arange(20_000, dtype=torch.int32)).double()
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    # Rows, and columns, are independent of each other.
    normal = (noise - noise.mean()) / noise.std()
    assert float((normal[:-1] * normal[1:]).mean(-1).abs().max()) < 0.05
    assert abs(float((normal[:, :-1] * normal[:, 1:]).mean())) < 0.01


def test_noise_increases_with_the_bits_of_its_hash() -> None:
    """The native operator compares hashes instead of noise."""
    keys, token_ids = keys_of(*DRAWS), torch.arange(5000, dtype=torch.int32)
    noise = gumbel_noise(keys, token_ids)
    order = noise.argsort(-1)
    bits = uniform_bits(hash_tokens(keys, token_ids)).gather(1, order)
    assert bool((bits.diff() >= 0).all())


def test_the_ends_of_the_uniform_range_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, -1]], dtype=torch.int32)
    monkeypatch.setattr("engine.execution.sampling.gumbel.hash_tokens", lambda *_: ends)
    lowest, highest = gumbel_noise(ends, ends)[0].tolist()
    assert lowest == pytest.approx(-math.log(-math.log(2.0**-24)))
    assert highest == pytest.approx(-math.log(-math.log1p(-(2.0**-24))), rel=1e-5)
