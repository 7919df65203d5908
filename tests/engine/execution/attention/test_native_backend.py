"""The native operator against torch's backend, over shapes, windows and features, and bit against bit."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import LayerSpec
from engine.execution.attention.native_backend import NativeAttention, bytes_per_block
from engine.execution.attention.native_self_check import check_operator
from engine.execution.machine.memory import PAGE
from tests.engine.execution.attention.bench import BITS, STEPS, TOLERANCE, Bench
from tests.engine.execution.pools import attention_operator, cpu_shape


def check(spec: LayerSpec, block_size: int, dtype: torch.dtype = torch.float32) -> None:
    bench = Bench(spec, block_size, dtype)
    ours, theirs = (bench.run(bench.backend(name), STEPS) for name in ("native", "torch"))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        torch.stack(list(ours.values())), torch.stack(list(theirs.values())), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 65])
def test_windows_and_block_sizes(block_size: int, window: int | None, dtype: torch.dtype) -> None:
    check(LayerSpec(4, 2, 8, 8, 0.4, sliding_window=window), block_size, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (7, 1), (16, 2), (40, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_heads_and_their_sizes(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check(LayerSpec(num_heads, num_kv_heads, head_dim, head_dim, head_dim**-0.5), 16, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 1.5, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 12), (7, 33)])
def test_features(
    window: int | None, softcap: float | None, sinks: bool, head_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    check(LayerSpec(6, 2, head_dim, value_dim, 0.5, window, softcap, sinks), 16, dtype)


@settings(max_examples=25)
@given(
    group=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 60),
    sinks=st.booleans(),
    block_size=st.integers(1, 48),
)
def test_any_layer(
    group: int,
    num_kv_heads: int,
    sizes: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    block_size: int,
) -> None:
    spec = LayerSpec(group * num_kv_heads, num_kv_heads, *sizes, sizes[0] ** -0.5, window, softcap, sinks)
    check(spec, block_size)


LONG = 1100
"""More than two splits of the operator."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 600])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(window: int | None, dtype: torch.dtype) -> None:
    """Alone token by token at the end, in chunks of any size, beside others: by 1 thread and by 2."""
    bench = Bench(replace(BITS, sliding_window=window), 16, dtype, longest=LONG)
    batches = (
        (((0, 0, LONG - 2),), ((0, LONG - 2, LONG - 1),), ((0, LONG - 1, LONG),)),
        (((0, 0, 333), (1, 0, 40)), ((1, 40, 41), (0, 333, 1099), (2, 0, 7)), ((2, 7, 8), (0, 1099, LONG))),
        (((3, 0, 50), (0, 0, 17)), ((0, 17, LONG),)),
    )  # fmt: skip
    threads = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for steps in batches:
                outputs = bench.run(bench.backend("native"), steps)
                found.append(torch.stack([outputs[0, at] for at in range(LONG)]))
    finally:
        torch.set_num_threads(threads)
    assert not found[0].isnan().any()
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_long_contexts(dtype: torch.dtype) -> None:
    bench = Bench(BITS, 16, dtype, longest=LONG)
    steps = (((0, 0, LONG - 70),), ((0, LONG - 70, LONG - 1), (1, 0, 5)), ((0, LONG - 1, LONG),))
    ours, theirs = (bench.run(bench.backend(name), steps) for name in ("native", "torch"))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        torch.stack(list(ours.values())), torch.stack(list(theirs.values())), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nan_affects_its_own_sequence_only(dtype: torch.dtype) -> None:
    """It must come out as one, so that its request fails, and nowhere else."""
    bench = Bench(BITS, 4, dtype)
    clean = bench.run(bench.backend("native"), STEPS)
    bench.tokens[2][1][3] = torch.nan
    bench.tokens[3][2][40] = torch.nan
    found = bench.run(bench.backend("native"), STEPS)
    for (who, at), row in found.items():
        if (who == 2 and at >= 3) or (who == 3 and at >= 40):
            assert row.isnan().any()
        elif who < 2:
            assert torch.equal(row, clean[who, at])


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_zero_blocks_zeroes_only_these_blocks(block_size: int) -> None:
    spec = LayerSpec(2, 2, 16, 16, 1.0)
    backend = NativeAttention(attention_operator(), cpu_shape((spec,), 8, block_size))
    (pool,) = backend.pool.layers
    pool.fill_(1.0)
    backend.zero_blocks((1, 3))
    assert int((pool == 0).sum()) == 2 * block_size * spec.kv_size


def test_layers_do_not_need_new_pages_all_at_once() -> None:
    """They are filled side by side, and the system takes its time for a huge page."""
    specs = (LayerSpec(4, 2, 64, 64, 1.0),) * 5
    layers = NativeAttention(attention_operator(), cpu_shape(specs, 256, 16)).pool.layers
    assert all(layer.nbytes >= PAGE for layer in layers)
    places = sorted(layer.data_ptr() % PAGE for layer in layers)
    assert min(after - before for before, after in pairwise(places)) > PAGE // 6


def test_bytes_per_block() -> None:
    specs = (LayerSpec(4, 2, 8, 8, 1.0), LayerSpec(4, 4, 15, 24, 1.0))
    backend = NativeAttention(attention_operator(), cpu_shape(specs, 4, 16, torch.bfloat16))
    num_bytes = sum(layer.nbytes for layer in backend.pool.layers)
    assert bytes_per_block(attention_operator(), specs, 16, torch.bfloat16) == num_bytes // 4


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (LayerSpec(2, 2, 64, 64, 1.0), torch.float16, "float16"),
        (LayerSpec(2, 2, 513, 64, 1.0), torch.float32, "more than 512"),
        (LayerSpec(2, 2, 64, 513, 1.0), torch.float32, "more than 512"),
        (LayerSpec(3, 2, 64, 64, 1.0), torch.float32, "3 heads that share 2"),
    ],
)
def test_unsupported_shapes_are_refused(spec: LayerSpec, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        NativeAttention(attention_operator(), cpu_shape((spec,), 4, 16, dtype))


def test_the_library_passes_its_self_check() -> None:
    check_operator(attention_operator())
