"""What a model hands to the native operator: any view is read rightly, and what does not fit is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import LayerSpec
from tests.engine.execution.attention.bench import BITS, STEPS, TOLERANCE, Bench, Rows


def fused(rows: Rows) -> Rows:
    """Slices of one wide projection, as fused linears hand over."""
    wide = torch.cat([one.flatten(1) for one in rows], 1)
    parts = wide.split([one.shape[1] * one.shape[2] for one in rows], 1)
    query, key, value = (part.unflatten(1, one.shape[1:]) for part, one in zip(parts, rows, strict=True))
    return query, key, value


def strided(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Rows], Rows]:
    """Each tensor in another layout, with the same numbers."""

    def lay_out(rows: Rows) -> Rows:
        query, key, value = map(change, rows)
        return query, key, value

    return lay_out


def spread(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Every `step`-th number of a wider tensor that holds NaN between them."""
    wide = torch.full((*tensor.shape[:2], tensor.shape[2] * step + 3), torch.nan, dtype=tensor.dtype)
    view = wide[..., : tensor.shape[2] * step : step]
    view.copy_(tensor)
    return view


LAYOUTS = {
    "fused": fused,
    "heads first": strided(lambda one: one.transpose(0, 1).contiguous().transpose(0, 1)),
    "numbers apart": strided(lambda one: one.transpose(1, 2).contiguous().transpose(1, 2)),
    "with gaps": strided(lambda one: spread(one, 1)),
    "every other number": strided(lambda one: spread(one, 2)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_give_the_bits_of_copies(layout: str, dtype: torch.dtype) -> None:
    bench = Bench(BITS, 16, dtype)
    plain = bench.run(bench.backend("native"), STEPS)
    bench.lay_out = LAYOUTS[layout]
    found = bench.run(bench.backend("native"), STEPS)
    assert torch.equal(torch.stack(list(found.values())), torch.stack(list(plain.values())))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 1), (4, 4)])
def test_heads_that_are_one_expanded(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Strides of 0, as a key that all heads share has."""
    bench = Bench(LayerSpec(*heads, 16, 16, 0.25), 16, dtype)
    expanded = strided(lambda one: one[:, :1].expand(-1, one.shape[1], -1))
    bench.lay_out = expanded
    found = bench.run(bench.backend("native"), STEPS)
    bench.lay_out = lambda rows: strided(torch.Tensor.contiguous)(expanded(rows))
    plain = bench.run(bench.backend("native"), STEPS)
    assert torch.equal(torch.stack(list(found.values())), torch.stack(list(plain.values())))


@pytest.mark.parametrize("block_size", [4, 16, 24])
@pytest.mark.parametrize("window", [None, 5, 65])
def test_the_null_block_is_never_read(block_size: int, window: int | None) -> None:
    """Tables are padded with it; NaN in it affects no row."""
    bench = Bench(replace(BITS, sliding_window=window), block_size, torch.float32)
    plain = bench.run(bench.backend("native"), STEPS)
    backend = bench.backend("native")
    for layer in backend.pool.layers:  # type: ignore[attr-defined]  # of NativeAttention
        layer.fill_(torch.nan)
    found = bench.run(backend, STEPS)
    assert not torch.stack(list(plain.values())).isnan().any()
    assert torch.equal(torch.stack(list(found.values())), torch.stack(list(plain.values())))


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double()


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        (0, double), (1, double), (2, double),
        (0, lambda one: one[:, :-1]), (1, lambda one: one[:, :-1]), (2, lambda one: one[:, :-1]),
        (0, lambda one: one[..., :-1]), (1, lambda one: one[..., :-1]), (2, lambda one: one[..., :-1]),
        (0, lambda one: one[:-1]), (1, lambda one: one[:-1]), (2, lambda one: one[:-1]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_match_the_pool_are_refused(
    wrong: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The operator would read and write past it."""
    bench = Bench(BITS, 16, torch.float32)

    def lay_out(rows: Rows) -> Rows:
        query, key, value = (change(one) if i == wrong else one for i, one in enumerate(rows))
        return query, key, value

    bench.lay_out = lay_out
    name = ("queries", "keys", "values")[wrong]
    with pytest.raises(UnsupportedModel, match=rf"layer 0 has {name} of .* not of torch\.float32 \["):
        bench.run(bench.backend("native"), STEPS)


def test_sinks_of_other_heads_are_refused() -> None:
    bench = Bench(BITS, 16, torch.float32)
    bench.call = bench.call._replace(sinks=torch.zeros(5))
    with pytest.raises(UnsupportedModel, match=r"6 heads have sinks of the shape \[5\]"):
        bench.run(bench.backend("native"), STEPS)
