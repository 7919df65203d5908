"""Which kernel a linear multiplies: as measured, within the memory, and packed once."""

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from engine.execution.layers import packed_linears
from engine.execution.layers.linear_kernels import LinearKernel, Plain, Product
from engine.execution.layers.packed_linears import (
    ROW_COUNTS,
    Candidate,
    PackedLinear,
    Seconds,
    choose,
    measure,
    pack_linears,
)
from tests.engine.execution.layers.packing import (
    PLENTY,
    Recording,
    Refusing,
    all_ways,
    favour,
    pack_all,
    small,
)


@pytest.fixture(autouse=True)
def _no_linear_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "SMALLEST", 0)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 16, 17, 64, 65, 256, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel", all_ways(), ids=lambda kernel: kernel.name)
def test_every_way_gives_the_same_product(kernel: LinearKernel, num_rows: int, bias: bool) -> None:
    plain = nn.Linear(48, 40, bias=bias).requires_grad_(False)
    hidden = torch.randn(1, num_rows, 96)[..., :48]  # not contiguous
    packed = PackedLinear(plain, [kernel.bind(plain)] * len(ROW_COUNTS))
    with torch.inference_mode():
        torch.testing.assert_close(packed(hidden), plain(hidden))


def test_each_number_of_rows_goes_the_way_that_was_measured() -> None:
    model = small((8, 8))
    plain, other = Recording("plain"), Recording("other")

    def measured(candidates: Sequence[Candidate], like: nn.Linear) -> list[Seconds]:
        return [(2.0, 2.0, 2.0, 2.0, 2.0), (3.0, 1.0, 3.0, 1.0, 3.0)]

    assert pack_linears(model, (plain, other), max_bytes=PLENTY, measure=measured) == 1
    for num_rows in (0, 1, 2, 4, 5, 16, 17, 64, 65, 1000):
        model(torch.randn(num_rows, 8))
    assert plain.multiplied == [0, 1, 5, 16, 65, 1000]
    assert other.multiplied == [2, 4, 17, 64]


def test_the_way_that_gains_most_is_taken_where_it_is_faster_than_plain() -> None:
    assert choose([(1.0,) * 5]) == (0,) * 5
    assert choose([(1.0,) * 5, (0.5, 1.0, 2.0, 0.97, 0.9)]) == (1, 0, 0, 0, 1)
    # The second is faster twice, the first more often; what is slower than plain costs nothing.
    assert choose([(1.0,) * 5, (0.9,) * 5, (0.2, 0.5, 9.0, 9.0, 9.0)]) == (2, 2, 0, 0, 0)
    assert choose([(1.0,) * 5, (0.5,) * 5, (0.2, 0.9, 0.9, 0.9, 0.9)]) == (1,) * 5


def test_copies_that_do_not_fit_are_not_made() -> None:
    model = small((16, 32), (32, 16), (16, 4))
    num_bytes = model[0].weight.nbytes + model[2].weight.nbytes
    assert pack_linears(model, all_ways(), max_bytes=num_bytes, measure=favour("native")) == 2
    assert [type(one) for one in model] == [PackedLinear, nn.Linear, PackedLinear]


def test_a_weight_is_packed_once_by_each_way_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(*[(8, 8)] * 4)
    linears = list(model)
    monkeypatch.setattr(packed_linears, "MOST_WEIGHTS", 2)
    kernels = (Plain(), Recording("chosen"), Recording("other"))
    assert pack_linears(model, kernels, max_bytes=PLENTY, measure=favour("chosen")) == 4
    assert kernels[1].bound == linears
    assert kernels[2].bound == linears[:2]


def test_linears_of_one_shape_keep_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(*[(8, 8)] * 4)
    hidden = torch.randn(3, 8)
    right = [one(hidden) for one in model]
    monkeypatch.setattr(packed_linears, "MOST_WEIGHTS", 2)
    assert pack_all(model, "native", monkeypatch) == 4
    torch.testing.assert_close([one(hidden) for one in model], right)


def test_so_many_weights_are_measured_that_no_cache_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(*[(8, 8)] * 10)
    kernel = Recording()
    for cold_bytes, num_samples in ((1 << 20, 8), (3 * 256, 3), (2 * 256 + 1, 3), (1, 1)):
        monkeypatch.setattr(packed_linears, "COLD_BYTES", cold_bytes)
        kernel.bound.clear()
        pack_linears(model, (Plain(), kernel), max_bytes=PLENTY, measure=favour("plain"))
        assert len(kernel.bound) == num_samples


def test_what_no_way_takes_stays_plain(caplog: pytest.LogCaptureFixture) -> None:
    model = small((8, 8))
    caplog.set_level(logging.INFO)
    assert pack_linears(model, (Plain(), Refusing()), max_bytes=PLENTY) == 0
    assert type(model[0]) is nn.Linear
    assert "weights of torch.float32 are not packed by refusing: bf16 path needs" in caplog.text


def test_what_one_way_refuses_another_may_take() -> None:
    model = small((8, 8))
    kernel = Recording()
    assert (
        pack_linears(model, (Plain(), Refusing(), kernel), max_bytes=PLENTY, measure=favour(kernel.name)) == 1
    )
    model(torch.randn(3, 8))
    assert kernel.multiplied == [3]


def test_measuring_runs_every_way_with_all_row_counts() -> None:
    kernels = (Recording("plain"), Recording("other"))
    linears = [nn.Linear(32, 64).requires_grad_(False) for _ in range(2)]
    found = measure(
        [Candidate(kernel, [kernel.bind(one) for one in linears]) for kernel in kernels], linears[0]
    )
    assert [len(one) for one in found] == [len(ROW_COUNTS)] * 2
    assert all(0 < seconds < 60 for one in found for seconds in one)
    for kernel in kernels:
        assert sorted(set(kernel.multiplied)) == list(ROW_COUNTS)
        assert min(map(kernel.multiplied.count, ROW_COUNTS)) >= packed_linears.NUM_TURNS


def test_a_way_that_is_slow_and_takes_long_is_not_measured_with_more_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def least_seconds(kernels: list[list[Product]], hidden: torch.Tensor) -> list[float]:
        return [products[0](hidden).item() for products in kernels]

    def takes(*seconds: float) -> Product:
        by_rows = dict(zip(ROW_COUNTS, seconds, strict=False))
        return lambda hidden: torch.tensor(by_rows[len(hidden)])

    monkeypatch.setattr(packed_linears, "_least_seconds", least_seconds)
    kernel = Plain()
    slow, fast, close = takes(0.005, 0.009, 0.1), takes(*[0.004] * 5), takes(*[0.007] * 5)
    found = measure([Candidate(kernel, [product]) for product in (slow, fast, close)], nn.Linear(4, 4))
    torch.testing.assert_close(
        torch.tensor(found),
        torch.tensor([[0.005, 0.009, 0.1, 0.4, 1.6], [0.004] * 5, [0.007] * 5]),
    )


def test_the_weights_can_still_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small((8, 6))
    (plain,) = model
    pack_all(model, "native", monkeypatch)
    (packed,) = model
    assert (packed.in_features, packed.out_features) == (8, 6)
    assert packed.weight is plain.weight
    assert packed.bias is plain.bias
