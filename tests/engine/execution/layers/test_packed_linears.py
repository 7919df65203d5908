"""Packed linears: which weight multiplies, within the memory, and the same products."""

import pytest
import torch
from torch import nn

from engine.execution.layers import packed_linears
from engine.execution.layers.linear_operator import LinearOperator, PackedWeight
from engine.execution.layers.packed_linears import PackedLinear, maximum_rows, pack_linears
from tests.engine.execution.pools import native_library

PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def _no_linear_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "MINIMUM_NUMEL", 0)


class RecordingOperator(LinearOperator):
    """Records the weights that it packs and the rows that it multiplies."""

    def __init__(self) -> None:
        super().__init__(native_library())
        self.packed: list[torch.Tensor] = []
        self.multiplied: list[int] = []

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        self.packed.append(weight)
        return super().pack(weight)

    def multiply(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        self.multiplied.append(hidden.shape[0])
        return super().multiply(hidden, weight, bias)


def small(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size) for size in sizes)).requires_grad_(False)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 16, 17, 64, 65, 256, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_the_packed_weight_gives_the_same_product(num_rows: int, bias: bool) -> None:
    plain = nn.Linear(48, 40, bias=bias).requires_grad_(False)
    hidden = torch.randn(1, num_rows, 96)[..., :48]  # not contiguous
    packed = PackedLinear(plain, LinearOperator(native_library()), None)
    with torch.inference_mode():
        torch.testing.assert_close(packed(hidden), plain(hidden))


def test_many_rows_are_multiplied_with_the_plain_weight() -> None:
    plain, operator = nn.Linear(8, 8).requires_grad_(False), RecordingOperator()
    packed = PackedLinear(plain, operator, 4)
    for num_rows in (0, 1, 3, 4, 5, 1000):
        hidden = torch.randn(num_rows, 8)
        torch.testing.assert_close(packed(hidden), plain(hidden))
    assert operator.multiplied == [0, 1, 3, 4]


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_instructions_multiply_many_rows(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linears, "_multiplies_bfloat16", lambda: has_bfloat16)
    assert maximum_rows(torch.float32) is None
    assert maximum_rows(torch.bfloat16) == (packed_linears.BFLOAT16_ROWS if has_bfloat16 else None)


def test_copies_that_do_not_fit_are_not_made() -> None:
    model = small((16, 32), (32, 16), (16, 4))
    num_bytes = 4 * (16 * 32 + 16 * 4)
    assert pack_linears(model, LinearOperator(native_library()), max_bytes=num_bytes) == 2
    assert [type(one) for one in model] == [PackedLinear, nn.Linear, PackedLinear]


def test_each_weight_is_packed_once() -> None:
    model, operator = small(*[(8, 8)] * 4), RecordingOperator()
    weights = [one.get_parameter("weight").data_ptr() for one in model]
    assert pack_linears(model, operator, max_bytes=PLENTY) == 4
    assert [weight.data_ptr() for weight in operator.packed] == weights


def test_linears_of_one_shape_keep_their_own_weights() -> None:
    model = small(*[(8, 8)] * 4)
    hidden = torch.randn(3, 8)
    expected = [one(hidden) for one in model]
    assert pack_linears(model, LinearOperator(native_library()), max_bytes=PLENTY) == 4
    torch.testing.assert_close([one(hidden) for one in model], expected)


def test_unsupported_weights_stay_plain() -> None:
    model = small((8, 8), (8, 8), (8, 8)).to(torch.float16)
    model[1].to(torch.bfloat16)
    model[1].bias = nn.Parameter(torch.zeros(8), requires_grad=False)
    model[2].to("meta")
    assert pack_linears(model, LinearOperator(native_library()), max_bytes=PLENTY) == 0
    assert [type(one) for one in model] == [nn.Linear] * 3


def test_weights_can_still_be_read() -> None:
    model = small((8, 6))
    (plain,) = model
    pack_linears(model, LinearOperator(native_library()), max_bytes=PLENTY)
    (packed,) = model
    assert isinstance(packed, PackedLinear)
    assert (packed.in_features, packed.out_features) == (8, 6)
    assert packed.weight is plain.weight
    assert packed.bias is plain.bias
