"""Linears go the kernel that was measured at an earlier start, if nothing has changed since."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.execution import plans as numerics
from engine.execution.attention.interface import ATTENTION_NAME, install
from engine.execution.layers import packed_linears
from engine.execution.layers.linear_kernels import Plain
from engine.execution.layers.packed_linears import ROW_COUNTS, Candidate, PackedLinear, Seconds, pack_linears
from engine.execution.machine.autotune_cache import AutotuneCache
from engine.execution.machine.native_library import NativeLibrary, machine_autotune_cache
from tests.engine.execution.layers.packing import PLENTY, Recording, Refusing, all_ways, favour, small
from tests.engine.execution.pools import native_library
from tests.tiny_models import make_model


@pytest.fixture(autouse=True)
def _no_linear_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "SMALLEST", 0)


class Counting:
    """A measure that favours one kernel, and how often it was asked."""

    def __init__(self, name: str) -> None:
        self.calls = 0
        self._measure = favour(name)

    def __call__(self, candidates: Sequence[Candidate], like: nn.Linear) -> list[Seconds]:
        self.calls += 1
        return self._measure(candidates, like)


def remembered_in(directory: Path) -> AutotuneCache:
    return AutotuneCache(directory, {})


@pytest.mark.parametrize("name", ["plain", "native"])
def test_what_is_remembered_is_not_measured_again(name: str, tmp_path: Path) -> None:
    hidden = torch.randn(3, 16)
    first, second = Counting(name), Counting("oneDNN")
    for measuring in (first, second):
        model = small((16, 32), (32, 16))
        right = model(hidden)
        num_packed = pack_linears(
            model, all_ways(), max_bytes=PLENTY, measure=measuring, remembered=remembered_in(tmp_path)
        )
        assert num_packed == (2 if name == "native" else 0)
        torch.testing.assert_close(model(hidden), right)
    assert (first.calls, second.calls) == (2, 0)


def test_only_the_remembered_ways_are_bound(tmp_path: Path) -> None:
    def kernels() -> tuple[Plain, Recording, Recording]:
        return Plain(), Recording("chosen"), Recording("other")

    remembered = remembered_in(tmp_path)
    pack_linears(small((8, 8)), kernels(), max_bytes=PLENTY, measure=favour("chosen"), remembered=remembered)
    model, (plain, chosen, other) = small((8, 8)), kernels()
    linears = list(model)
    pack_linears(
        model, (plain, chosen, other), max_bytes=PLENTY, measure=favour("other"), remembered=remembered
    )
    assert (chosen.bound, other.bound) == (linears, [])


def other_threads(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    number = torch.get_num_threads() + 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    return small((16, 32))


def other_rows(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(packed_linears, "ROW_COUNTS", (1, 4, 16, 64, 257))
    return small((16, 32))


def other_sample(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return small((16, 32), (16, 32))


def other_shape(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return small((32, 16))


def without_bias(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("change", [other_threads, other_rows, other_sample, other_shape, without_bias])
def test_under_other_conditions_it_is_measured_anew(
    change: Callable[[pytest.MonkeyPatch], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = remembered_in(tmp_path)
    pack_linears(
        small((16, 32)), all_ways(), max_bytes=PLENTY, measure=favour("native"), remembered=remembered
    )
    measuring = Counting("native")
    model = change(monkeypatch)
    pack_linears(model, all_ways(), max_bytes=PLENTY, measure=measuring, remembered=remembered)
    assert measuring.calls == 1


def test_with_other_ways_it_is_measured_anew(tmp_path: Path) -> None:
    remembered = remembered_in(tmp_path)
    pack_linears(
        small((16, 32)), all_ways(), max_bytes=PLENTY, measure=favour("oneDNN"), remembered=remembered
    )
    measuring = Counting("oneDNN")
    pack_linears(small((16, 32)), all_ways()[:2], max_bytes=PLENTY, measure=measuring, remembered=remembered)
    assert measuring.calls == 1


@pytest.mark.parametrize(
    "names",
    [
        ("native",) * (len(ROW_COUNTS) - 1),
        ("native",) * (len(ROW_COUNTS) - 1) + ("another",),
        # Would be two copies of the weight.
        ("native",) * (len(ROW_COUNTS) - 1) + ("oneDNN",),
    ],
)
def test_a_remembered_choice_that_cannot_be_is_measured_anew(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutotuneCache, "find", lambda *_: names)
    measuring = Counting("plain")
    model = small((16, 32))
    remembered = remembered_in(tmp_path)
    assert pack_linears(model, all_ways(), max_bytes=PLENTY, measure=measuring, remembered=remembered) == 0
    assert measuring.calls == 1


def test_a_remembered_way_that_refuses_now_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutotuneCache, "find", lambda *_: ("refusing",) * len(ROW_COUNTS))
    model, kernel = small((8, 8)), Recording()
    kernels = (Plain(), Refusing(), kernel)
    remembered = remembered_in(tmp_path)
    assert (
        pack_linears(model, kernels, max_bytes=PLENTY, measure=favour(kernel.name), remembered=remembered)
        == 1
    )
    model(torch.randn(3, 8))
    assert kernel.multiplied == [3]


def test_the_limit_of_memory_holds_for_what_is_remembered(tmp_path: Path) -> None:
    remembered = remembered_in(tmp_path)
    pack_linears(
        small((16, 32), (32, 16)),
        all_ways(),
        max_bytes=PLENTY,
        measure=favour("native"),
        remembered=remembered,
    )
    model = small((16, 32), (32, 16))
    (num_bytes,) = {one.weight.nbytes for one in model}
    limit = 2 * num_bytes - 1
    assert pack_linears(model, all_ways(), max_bytes=limit, remembered=remembered) == 1
    assert [type(one) for one in model] == [PackedLinear, nn.Linear]


@pytest.mark.parametrize(("share", "is_disturbed"), [(1.0, False), (0.8, True)])
def test_a_measuring_without_a_processor_for_all_of_it_is_disturbed(
    share: float, is_disturbed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def measuring(candidates: Sequence[Candidate], like: nn.Linear) -> list[Seconds]:
        clock[0] += 1.0
        return favour("native")(candidates, like)

    kept: list[bool] = []
    monkeypatch.setattr(AutotuneCache, "keep", lambda *_, is_disturbed: kept.append(is_disturbed))
    monkeypatch.setattr(packed_linears.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(packed_linears.time, "thread_time", lambda: share * clock[0])
    pack_linears(
        small((8, 8)), all_ways(), max_bytes=PLENTY, measure=measuring, remembered=remembered_in(tmp_path)
    )
    assert kept == [is_disturbed]


def test_another_dtype_is_measured_anew(tmp_path: Path) -> None:
    remembered, measuring = remembered_in(tmp_path), Counting("native")
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(16, 32, bias=False, dtype=dtype)).requires_grad_(False)
        pack_linears(model, all_ways(), max_bytes=PLENTY, measure=measuring, remembered=remembered)
    assert measuring.calls == 2


def test_a_plain_model_is_prepared_by_what_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def find(_: AutotuneCache, facts: object) -> tuple[str, ...]:
        asked.append(facts)
        return ("plain",) * len(ROW_COUNTS)

    monkeypatch.setattr(AutotuneCache, "find", find)
    install()
    model = make_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    numerics.plain((), None, remembered=remembered_in(tmp_path)).prepare(model)
    assert asked


def test_what_is_remembered_of_a_machine_holds_for_its_like_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices(library: NativeLibrary | None = None) -> AutotuneCache:
        found = machine_autotune_cache(tmp_path, library)
        assert found is not None
        return found

    choices().keep({}, ("plain",))
    assert choices().find({}) == ("plain",)
    assert choices(native_library()).find({}) is None
    with monkeypatch.context() as other:
        other.setattr("engine.execution.machine.native_library.cpu_facts", lambda: "another")
        assert choices().find({}) is None
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "another")
        assert choices().find({}) is None
    assert machine_autotune_cache(None, native_library()) is None
