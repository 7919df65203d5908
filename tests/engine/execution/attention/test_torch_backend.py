"""Paged attention against attention written out token by token, over shapes, windows and features."""

import math
from dataclasses import dataclass

import pytest
import torch

from engine.execution.attention import torch_backend as torch_attention
from engine.execution.attention.interface import LayerCall, LayerSpec
from engine.execution.attention.kv_pool import KVPool
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.runner.inputs import InputBuilder
from engine.outputs import SchedulerOutputs
from tests.engine.execution.pools import cpu_shape
from tests.engine.execution.serving import in_slot, part

LONGEST = 40
NUM_SLOTS = 24


@dataclass(frozen=True)
class Tokens:
    """All queries, keys and values of one sequence, and the blocks that hold them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def written_out(spec: LayerSpec, sinks: torch.Tensor | None, tokens: Tokens, position: int) -> torch.Tensor:
    """The output of one token, in float64: [heads, value_dim]."""
    first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
    rows = []
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        keys = tokens.key[first : position + 1, kv_head].double()
        scores = keys @ tokens.query[position, head].double() * spec.scaling
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
        rows.append((weights / total) @ tokens.value[first : position + 1, kv_head].double())
    return torch.stack(rows)


def check(spec: LayerSpec, block_size: int, dtype: torch.dtype = torch.float32) -> None:
    """Compute sequences of many lengths in chunks and decode rows, and compare every row."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tokens = [
        Tokens(
            noise(LONGEST, spec.num_heads, spec.head_dim),
            noise(LONGEST, spec.num_kv_heads, spec.head_dim),
            noise(LONGEST, spec.num_kv_heads, spec.value_dim),
        )
        for _ in range(NUM_SLOTS)
    ]
    sinks = noise(spec.num_heads) if spec.sinks else None
    blocks_each = -(-LONGEST // block_size)
    backend = TorchAttention(cpu_shape((spec,), 1 + NUM_SLOTS * blocks_each, block_size, dtype))
    for pool in (*backend.pool.keys, *backend.pool.values):
        pool[1:] = torch.nan
    sequences = [
        in_slot(slot, [0] * LONGEST, list(range(1 + slot, 1 + NUM_SLOTS * blocks_each, NUM_SLOTS)))
        for slot in range(NUM_SLOTS)
    ]
    inputs = InputBuilder(NUM_SLOTS, LONGEST, block_size)
    call = LayerCall(0, spec.scaling, spec.sliding_window, spec.softcap, sinks)

    def step(*parts: tuple[int, int, int]) -> None:
        items = tuple(part(sequences[who], start, end) for who, start, end in parts)
        batch = inputs.build(SchedulerOutputs(prefill=items)).batch
        rows = [
            torch.cat([getattr(tokens[who], name)[start:end] for who, start, end in parts])
            for name in ("query", "key", "value")
        ]
        found = backend.build_metadata(batch).forward(call, *rows)
        assert found.dtype == dtype
        places = [(who, position) for who, start, end in parts for position in range(start, end)]
        right = torch.stack([written_out(spec, sinks, tokens[who], at) for who, at in places])
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)

    # First chunks of every length, one of a single token; then all decode beside two continued chunks.
    step(*((who, 0, 1 + who) for who in range(NUM_SLOTS - 2)))
    step((NUM_SLOTS - 2, 0, 9), (NUM_SLOTS - 1, 0, 16))
    step(
        *((who, 1 + who, 2 + who) for who in range(NUM_SLOTS - 2)),
        (NUM_SLOTS - 2, 9, 10),
        (NUM_SLOTS - 1, 16, 37),
    )
    step((0, 2, 7), (NUM_SLOTS - 2, 10, LONGEST), (NUM_SLOTS - 1, 37, 38))


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_windows_and_block_sizes(block_size: int, window: int | None) -> None:
    check(LayerSpec(4, 2, 8, 8, 0.4, sliding_window=window), block_size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (4, 1), (6, 2), (7, 1), (8, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
def test_heads_and_their_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(LayerSpec(num_heads, num_kv_heads, head_dim, head_dim, head_dim**-0.5), 4)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_features(window: int | None, softcap: float | None, sinks: bool, value_dim: int) -> None:
    check(LayerSpec(6, 2, 8, value_dim, 0.5, window, softcap, sinks), 4)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_bfloat16(softcap: float | None) -> None:
    check(LayerSpec(4, 2, 16, 16, 0.25, softcap=softcap), 4, torch.bfloat16)


def test_scores_are_formed_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 100)
    check(LayerSpec(6, 2, 8, 8, 0.5, 6, 1.5, True), 4)


def test_bytes_per_block() -> None:
    specs = (LayerSpec(4, 2, 8, 8, 1.0), LayerSpec(4, 4, 16, 24, 1.0))
    backend = TorchAttention(cpu_shape(specs, 3, 16, torch.bfloat16))
    pools = (*backend.pool.keys, *backend.pool.values)
    assert KVPool.bytes_per_block(specs, 16, torch.bfloat16) == sum(
        math.prod(pool.shape[1:]) * pool.itemsize for pool in pools
    )


def test_zero_blocks_zeroes_them() -> None:
    backend = TorchAttention(cpu_shape((LayerSpec(2, 2, 4, 4, 1.0),), 4, 2))
    for pool in (*backend.pool.keys, *backend.pool.values):
        pool[:] = torch.nan
        pool[2] = 7.0
    backend.zero_blocks((1, 3))
    for pool in (*backend.pool.keys, *backend.pool.values):
        assert not pool[1].any()
        assert not pool[3].any()
        assert bool((pool[2] == 7.0).all())
