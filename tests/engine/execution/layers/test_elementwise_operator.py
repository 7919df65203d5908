"""Native norms and gates against torch: values, views, NaN, and the bits of a row."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.layers.elementwise_operator import (
    FORMULAS,
    Activation,
    ElementwiseOperator,
    NormFormula,
    check_elementwise,
)
from engine.execution.machine.native_build import CannotBuild
from tests.engine.execution.pools import native_library

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
"""Relative. In bfloat16, a difference in the last bit of float32 may flip a rounding, or two."""
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 67, 96, 129, 576, 1031)


@pytest.fixture(scope="module")
def operator() -> ElementwiseOperator:
    return ElementwiseOperator(native_library())


def noise(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_norm(operator: ElementwiseOperator, formula: NormFormula, hidden: torch.Tensor) -> torch.Tensor:
    weight = noise(hidden.shape[-1], seed=1).to(hidden.dtype)
    found = operator.norm(formula, weight)(hidden)
    assert found is not None
    assert found.dtype == hidden.dtype
    tolerance = TOLERANCE[hidden.dtype]
    expected = formula.reference(hidden, weight)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, equal_nan=True)
    if hidden.dtype == torch.bfloat16 and hidden.numel() > 100:
        # With another order of rounding a quarter of the elements would differ.
        assert float((found.nan_to_num() == expected.nan_to_num()).float().mean()) > 0.98
    return found


def check_gate(
    operator: ElementwiseOperator, activation: Activation, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    found = operator.gate(activation)(gate, up)
    assert found is not None
    assert found.dtype == gate.dtype
    expected = activation.reference(gate) * up
    # In a nearly closed gate, 1 + tanh and 1 + erf cancel, in torch too.
    tolerance = TOLERANCE[gate.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=8e-6, equal_nan=True)
    if gate.dtype == torch.bfloat16 and gate.numel() > 100:
        assert float((found.nan_to_num() == expected.nan_to_num()).float().mean()) > 0.95
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("size", SIZES)
def test_norms(operator: ElementwiseOperator, size: int, formula: NormFormula, dtype: torch.dtype) -> None:
    for scale in (1e-3, 1.0, 300.0):
        check_norm(operator, formula, noise(5, size, scale=scale).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", SIZES)
def test_gates(operator: ElementwiseOperator, size: int, activation: Activation, dtype: torch.dtype) -> None:
    gate, up = noise(5, size, scale=3.0).to(dtype), noise(5, size, seed=1).to(dtype)
    check_gate(operator, activation, gate, up)


@pytest.mark.parametrize("activation", Activation)
def test_a_gate_is_precise_at_every_magnitude(operator: ElementwiseOperator, activation: Activation) -> None:
    """Relative precision near 0, no overflow, and the boundaries between formulas."""
    sizes = torch.logspace(-30, 4, 4001)
    gate = torch.cat([sizes, -sizes, torch.linspace(-12, 12, 4001), torch.zeros(1)])
    found = operator.gate(activation)(gate, torch.ones_like(gate))
    assert found is not None
    exact = activation.reference(gate.double())
    assert float(((found - exact).abs() / gate.abs().clamp(min=1e-30)).max()) < 5e-7


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    size=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1]),
    kind=st.tuples(st.sampled_from([0.0, 1.0]), st.booleans()),
    activation=st.sampled_from(list(Activation)),
    step=st.integers(1, 2),
    flipped=st.booleans(),
)
def test_any_view(
    operator: ElementwiseOperator,
    shape: list[int],
    size: int,
    dtype: torch.dtype,
    epsilon: float,
    kind: tuple[float, bool],
    activation: Activation,
    step: int,
    flipped: bool,
) -> None:
    """The memory between the elements of a view is NaN and must not be read."""
    wide = torch.full((*shape, size * step + 3), torch.nan, dtype=dtype)
    view = wide[..., : size * step : step]
    view.copy_(noise(*shape, size))
    if flipped and len(shape) > 1:
        view = view.transpose(0, -2)
    check_norm(operator, NormFormula(epsilon, *kind), view)
    check_gate(operator, activation, view, noise(*view.shape, seed=2).to(dtype))
    check_gate(operator, activation, noise(*view.shape, seed=2).to(dtype), view)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_a_fused_product_give_the_bits_of_copies(
    operator: ElementwiseOperator, dtype: torch.dtype
) -> None:
    wide = noise(1, 9, 3 * 64 + 2 * 50).to(dtype)
    heads, gate, up = wide.split([3 * 64, 50, 50], dim=-1)
    heads = heads.view(1, 9, 3, 64)
    norm = operator.norm(FORMULAS[0], noise(64).to(dtype))
    for view in (heads, heads.transpose(1, 2)):
        assert same(norm(view), norm(view.contiguous()))
    one = operator.gate(Activation.SILU)
    assert same(one(gate, up), one(gate.contiguous(), up.contiguous()))


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """The same shape and bits."""
    assert left is not None
    assert right is not None
    return torch.equal(left, right)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Operation = Callable[[torch.Tensor], torch.Tensor | None]


def kernels(operator: ElementwiseOperator, dtype: torch.dtype, size: int) -> list[Operation]:
    """Every operation on rows of `size` elements."""
    weight = noise(size, seed=1).to(dtype)
    gates = [operator.gate(activation) for activation in Activation]
    return [
        *(operator.norm(formula, weight) for formula in FORMULAS),
        *(lambda hidden, gate=gate: gate(hidden, hidden.flip(-1)) for gate in gates),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(700, 67), (40, 1031), (3, 20011)])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(
    operator: ElementwiseOperator, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    """Alone, in a batch, and with one or several threads; large enough to be divided among threads."""
    hidden = noise(num_rows, size, scale=2.0).to(dtype)
    for kernel in kernels(operator, dtype, size):
        alone = torch.cat([one for row in hidden if (one := kernel(row[None])) is not None])
        for count in (1, 2, 3):
            with threads(count):
                assert same(kernel(hidden), alone)
                assert same(kernel(hidden[1:]), alone[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 70, 99])
def test_non_finite_elements_affect_their_own_row_only(
    operator: ElementwiseOperator, column: int, bad: float, dtype: torch.dtype
) -> None:
    """In a whole vector and in the remainder of a row.

    torch is not the reference: its gelu of infinity is NaN on AVX-512 processors and infinity on AVX2.
    """
    clean = noise(4, 100).to(dtype)
    hidden = clean.clone()
    hidden[2, column] = bad
    others = [at for at in range(100) if at != column]
    for formula in FORMULAS:
        norm = operator.norm(formula, noise(100, seed=1).to(dtype))
        found, expected = norm(hidden), norm(clean)
        assert found is not None
        assert expected is not None
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
        assert not found[2, column].isfinite()
        # The norm of the row is infinite: its finite elements become 0 or NaN.
        assert not (found[2, others].isfinite() & (found[2, others] != 0)).any()
    for activation in Activation:
        gated = operator.gate(activation)
        expected = gated(clean, clean)
        assert expected is not None
        for gate, up in ((hidden, clean), (clean, hidden)):
            found = gated(gate, up)
            assert found is not None
            assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
            assert torch.equal(found[2, others], expected[2, others])
            # A gate of minus infinity is closed: 0 is correct, and so is NaN, for 0 times infinity.
            closed = gate is hidden and bad == -math.inf and found[2, column] == 0
            assert closed or not found[2, column].isfinite()


def test_nan_of_any_payload_stays_nan_in_bfloat16(operator: ElementwiseOperator) -> None:
    """Rounding must not carry into the exponent."""
    bits = torch.tensor([0x7F81, 0x7FC1, 0x7FFF, -0x0001, -0x003F], dtype=torch.int16)
    hidden = bits.view(torch.bfloat16).repeat(1, 9)
    assert hidden.isnan().all()
    for kernel in kernels(operator, torch.bfloat16, hidden.shape[-1]):
        found = kernel(hidden)
        assert found is not None
        assert found.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(operator: ElementwiseOperator, dtype: torch.dtype) -> None:
    for kernel in kernels(operator, dtype, 8):
        found = kernel(torch.empty(1, 0, 8, dtype=dtype))
        assert found is not None
        assert found.shape == (1, 0, 8)


def test_unsupported_tensors_are_refused(operator: ElementwiseOperator) -> None:
    """The library would read out of bounds."""
    norm, gate = operator.norm(FORMULAS[0], noise(8)), operator.gate(Activation.SILU)
    right = noise(2, 8)
    assert norm(right) is not None
    assert gate(right, right) is not None
    for wrong in (noise(2, 7), noise(2, 8).bfloat16(), noise(2, 8).double(), right.to("meta")):
        assert norm(wrong) is None
        assert gate(right, wrong) is None
        assert gate(wrong, right) is None
    for unknown in (right.double(), right.half(), right.to("meta")):
        assert gate(unknown, unknown) is None


def test_a_norm_keeps_its_weight_alive(operator: ElementwiseOperator) -> None:
    """The norm owns a float32 copy; freed memory would be read otherwise."""
    weight = noise(4096).bfloat16()
    norm = operator.norm(FORMULAS[0], weight)
    expected = norm(noise(1, 4096).bfloat16())
    del weight
    garbage = [torch.full((4096,), torch.nan) for _ in range(64)]
    assert same(norm(noise(1, 4096).bfloat16()), expected)
    assert len(garbage) == 64


def test_the_operators_pass_their_self_check(operator: ElementwiseOperator) -> None:
    check_elementwise(operator)


@pytest.mark.parametrize("fault", ["norm", "gate"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operator_that_is_wrong_in_one_dtype_fails_its_self_check(
    operator: ElementwiseOperator, dtype: torch.dtype, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(operator, fault)

    def wrong(*about: object) -> Callable[..., torch.Tensor]:
        native = right(*about)

        def compute(*given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = native(*given)
            if given[0].dtype == dtype:
                found[-1, -1] = math.nan
            return found

        return compute

    monkeypatch.setattr(operator, fault, wrong)
    with pytest.raises(CannotBuild, match=f"{fault} disagrees with torch by nan in {dtype}"):
        check_elementwise(operator)
