"""Packed linears: which kernel multiplies, within the memory, and the same products."""

import logging

import pytest
import torch
from torch import nn

from engine.execution.layers import packed_linears
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.packed_linears import PackedLinear, linear_kernels, pack_linears
from tests.engine.execution.layers.packing import (
    PLENTY,
    REFUSING,
    RecordingKernel,
    all_kernels,
    always,
    pack_all,
    small,
)
from tests.engine.execution.pools import native_library


@pytest.fixture(autouse=True)
def _no_linear_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "MINIMUM_NUMEL", 0)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 16, 17, 64, 65, 256, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["oneDNN", "native"])
def test_every_kernel_computes_the_same_product(name: str, num_rows: int, bias: bool) -> None:
    plain = nn.Linear(48, 40, bias=bias).requires_grad_(False)
    hidden = torch.randn(1, num_rows, 96)[..., :48]  # not contiguous
    packed = PackedLinear(plain, all_kernels()[name].pack(plain), 0)
    with torch.inference_mode():
        torch.testing.assert_close(packed(hidden), plain(hidden))


def test_few_rows_are_multiplied_with_the_plain_weight() -> None:
    model, recording = small((8, 8)), RecordingKernel(minimum_rows=4)
    plain = model[0]
    assert pack_linears(model, always(recording.kernel), max_bytes=PLENTY) == 1
    for num_rows in (0, 1, 3, 4, 5, 1000):
        hidden = torch.randn(num_rows, 8)
        assert torch.equal(model(hidden), plain(hidden))
    assert recording.multiplied == [4, 5, 1000]


def test_copies_that_do_not_fit_are_not_made() -> None:
    model = small((16, 32), (32, 16), (16, 4))
    num_bytes = model[0].weight.nbytes + model[2].weight.nbytes
    assert pack_linears(model, always(all_kernels()["native"]), max_bytes=num_bytes) == 2
    assert [type(one) for one in model] == [PackedLinear, nn.Linear, PackedLinear]


def test_each_weight_is_packed_once() -> None:
    model = small(*[(8, 8)] * 4)
    linears, chosen, other = list(model), RecordingKernel(), RecordingKernel()
    assert pack_linears(model, always(chosen.kernel, other.kernel), max_bytes=PLENTY) == 4
    assert chosen.packed == linears
    assert other.packed == []


def test_linears_of_one_shape_keep_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(*[(8, 8)] * 4)
    hidden = torch.randn(3, 8)
    expected = [one(hidden) for one in model]
    assert pack_all(model, "native", monkeypatch) == 4
    torch.testing.assert_close([one(hidden) for one in model], expected)


def test_weights_that_no_kernel_supports_stay_plain(caplog: pytest.LogCaptureFixture) -> None:
    model = small((8, 8))
    caplog.set_level(logging.INFO)
    assert pack_linears(model, always(REFUSING), max_bytes=PLENTY) == 0
    assert type(model[0]) is nn.Linear
    assert "weights of torch.float32 are not packed by refusing: bf16 path needs" in caplog.text


def test_the_next_kernel_packs_what_the_first_does_not_support() -> None:
    model, recording = small((8, 8)), RecordingKernel()
    assert pack_linears(model, always(REFUSING, recording.kernel), max_bytes=PLENTY) == 1
    model(torch.randn(3, 8))
    assert recording.multiplied == [3]


def test_weights_can_still_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small((8, 6))
    (plain,) = model
    pack_all(model, "native", monkeypatch)
    (packed,) = model
    assert (packed.in_features, packed.out_features) == (8, 6)
    assert packed.weight is plain.weight
    assert packed.bias is plain.bias


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_rule(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "_multiplies_bfloat16", lambda: has_bfloat16)

    def names(operator: LinearOperator | None, dtype: torch.dtype) -> list[str]:
        return [kernel.name for kernel in linear_kernels(operator, dtype)]

    operator = LinearOperator(native_library())
    assert names(operator, torch.float32) == ["native", "oneDNN"]
    assert names(operator, torch.bfloat16) == (["oneDNN", "native"] if has_bfloat16 else ["native", "oneDNN"])
    assert names(None, torch.float32) == names(None, torch.bfloat16) == ["oneDNN"]
