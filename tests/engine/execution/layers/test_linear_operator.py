"""The native linear against torch: shapes, layouts, and the bits of a row."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_operator import (
    LinearOperator,
    PackedWeight,
    check_linears,
    checked_linear_operator,
)
from engine.execution.machine.native_build import CannotBuild
from tests.engine.execution.pools import native_library

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@cache
def operator() -> LinearOperator:
    return LinearOperator(native_library())


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    found = operator().multiply(hidden, operator().pack(weight), bias)
    expected = linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == hidden.dtype
    assert found.is_contiguous()
    # Sums of products lose small terms.
    tolerance = TOLERANCE[hidden.dtype] * max(1.0, weight.shape[1] ** 0.5)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 11, 16, 64, 66, 67, 131, 133, 500])
@pytest.mark.parametrize("sizes", [(64, 48), (321, 80), (1, 17), (900, 33)])
def test_row_counts(num_rows: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    num_inputs, num_outputs = sizes
    check(
        noise(num_rows, num_inputs, dtype=dtype),
        noise(num_outputs, num_inputs, dtype=dtype),
        noise(num_outputs, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 321, 767, 768, 769, 1537])
@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 63, 64, 65, 130])
def test_sizes(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    check(noise(9, num_inputs, dtype=dtype), noise(num_outputs, num_inputs, dtype=dtype))


@settings(max_examples=60)
@given(
    num_rows=st.integers(0, 70),
    num_inputs=st.integers(1, 400),
    num_outputs=st.integers(1, 200),
    bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_linear(num_rows: int, num_inputs: int, num_outputs: int, bias: bool, dtype: torch.dtype) -> None:
    check(
        noise(num_rows, num_inputs, dtype=dtype),
        noise(num_outputs, num_inputs, dtype=dtype),
        noise(num_outputs, dtype=dtype) if bias else None,
    )


LAYOUTS = {
    "three dimensions": lambda one: one.view(2, 4, -1),
    "one row": lambda one: one[0],
    "no row": lambda one: one[:0],
    "wider rows": lambda one: torch.cat([one, torch.full_like(one, torch.nan)], -1)[:, : one.shape[-1]],
    "columns first": lambda one: one.t().contiguous().t(),
    "every other row": lambda one: one[::2],
    "one row for all": lambda one: one[:1].expand(5, -1),
    "every other number": lambda one: one.repeat_interleave(2, -1)[:, ::2],
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    hidden = LAYOUTS[layout](noise(8, 50, dtype=dtype))
    check(hidden, noise(40, 50, dtype=dtype), noise(40, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "lay_out", [lambda one: one.t().contiguous().t(), lambda one: one.repeat(2, 2)[::2, : one.shape[1]]]
)
def test_weights_that_are_views(lay_out, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(noise(3, 30, dtype=dtype), lay_out(noise(40, 30, dtype=dtype)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(576, 200), (1301, 37)])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    num_inputs, num_outputs = sizes
    packed = operator().pack(noise(num_outputs, num_inputs, dtype=dtype))
    bias, hidden = noise(num_outputs, dtype=dtype), noise(400, num_inputs, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = operator().multiply(hidden, packed, bias)
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 200, 400):
                for begin in (0, 400 - num_rows):
                    found = operator().multiply(hidden[begin : begin + num_rows], packed, bias)
                    assert torch.equal(found, whole[begin : begin + num_rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_non_finite_elements_affect_their_own_row_and_column_only(
    num_rows: int, bad: float, dtype: torch.dtype
) -> None:
    """Sizes that are padded, so that the padding shows if it is multiplied."""
    hidden, weight = noise(num_rows, 333, dtype=dtype), noise(37, 333, dtype=dtype)
    clean = operator().multiply(hidden, operator().pack(weight), None)
    hidden[-1, -1] = bad
    found = operator().multiply(hidden, operator().pack(weight), None)
    assert torch.equal(found[:-1], clean[:-1])
    assert not found[-1].isfinite().any()
    hidden[-1, -1] = 1.0
    weight[-1, -1] = bad
    found = operator().multiply(hidden, operator().pack(weight), None)
    assert torch.equal(found[:-1, :-1], clean[:-1, :-1])
    assert not found[:, -1].isfinite().any()


def test_memory_after_a_row_is_not_read() -> None:
    """The padding of the inputs may be beyond the last row and is never read."""
    hidden = torch.full((3, 8), torch.nan)[:, :5]
    hidden.copy_(noise(3, 5))
    check(hidden, noise(7, 5))
    check(hidden.bfloat16(), noise(7, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (torch.randn(3, 9), r"with 8 inputs got torch\.float32 \[3, 9\]"),
        (torch.randn(3, 7), r"with 8 inputs got torch\.float32 \[3, 7\]"),
        (torch.randn(3, 8, dtype=torch.bfloat16), r"float32 with 8 inputs got torch\.bfloat16"),
        (torch.randn(3, 8, device="meta"), "on meta"),
    ],
)
def test_inputs_that_do_not_match_the_weight_are_refused(hidden: torch.Tensor, reason: str) -> None:
    """The operator would read out of bounds."""
    with pytest.raises(UnsupportedModel, match=reason):
        operator().multiply(hidden, operator().pack(noise(4, 8)), None)


@pytest.mark.parametrize("weight", [torch.ones(4, 4, dtype=torch.float16), torch.ones(4, 4, device="meta")])
def test_unsupported_weights_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModel, match="does not support weights of"):
        operator().pack(weight)


def test_the_library_passes_its_self_check() -> None:
    check_linears(operator())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("error", [0.05, torch.nan])
def test_an_operator_that_computes_wrongly_is_not_used(
    error: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    multiply = LinearOperator.multiply

    def wrong(
        self: LinearOperator, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = multiply(self, hidden, weight, bias)
        if out.dtype == dtype and len(out) == 7:
            out[-1, -1] += error
        return out

    monkeypatch.setattr(LinearOperator, "multiply", wrong)
    with pytest.raises(CannotBuild, match=rf"linear disagrees with torch by .* in {dtype}"):
        check_linears(operator())
    assert checked_linear_operator(native_library()) is None
    assert "linears are computed by torch, which is slower: the compiled linear disagrees" in caplog.text


def test_without_a_library_there_is_no_operator() -> None:
    assert checked_linear_operator(None) is None
    assert checked_linear_operator(native_library()) is not None
