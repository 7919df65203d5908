"""Layers that are compiled while a model loads: the same tokens, few graphs, and nothing for a request."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.execution import numerics
from engine.execution.attention import ATTENTION_NAME, install
from engine.execution.attention_choice import TORCH
from engine.execution.build import build_execution
from engine.execution.compiled_layers import CACHE_FOLDER, CACHE_VARIABLE, compile_layers
from engine.execution.model_runner import ModelRunner
from engine.execution.packed_linears import PackedLinear
from tests.comparer import Reference, assert_equal_tokens, reference
from tests.engine.execution.pools import native_library
from tests.engine.execution.serving import GREEDY, make_prompts, make_runner, serve
from tests.tiny_models import make_model

PROMPTS = make_prompts((1, 5, 17, 33))
REQUESTS = {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)


class Counter:
    """A compiler that leaves graphs as they were traced, and counts them and their runs."""

    def __init__(self, wrong_by: float = 0.0) -> None:
        self.num_graphs = self.num_runs = 0
        self._wrong_by = wrong_by

    def __call__(self, graph: Callable[..., Any], _: list[torch.Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*given: Any) -> Any:
            self.num_runs += 1
            return tuple(one * (1 + self._wrong_by) for one in graph(*given))

        return run


def ready(arch: str) -> tuple[PreTrainedModel, ModelRunner]:
    """A model as it is prepared for a CPU; most of its linears are too small to be packed."""
    install()
    model = make_model(arch)
    model.set_attn_implementation(ATTENTION_NAME)
    prepare = numerics.plain((), native_library()).prepare
    prepare(model)
    return model, make_runner(model, CROWDED)


def compiled(arch: str, compiler: Any, cache_dir: Path | None = None) -> tuple[bool, ModelRunner]:
    model, runner = ready(arch)
    is_done = compile_layers(
        model, runner._backend, CROWDED, lambda _: None, cache_dir=cache_dir, compiler=compiler
    )
    return is_done, runner


def num_rotating(runner: ModelRunner) -> int:
    """How many modules have a forward of their own that rotates by the native operator."""
    return sum("forward" in vars(module) for module in runner._model.modules())


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the compiled layers: torch tells much beside it."""
    return [one for one in caplog.records if one.name == "engine.execution.compiled_layers"]


def expected(arch: str) -> dict[str, Reference]:
    model = make_model(arch)
    return {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}


@pytest.fixture(autouse=True)
def forget_graphs() -> Any:
    """torch keeps them by the code of a layer, so one test would be served from another's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("arch", "num_kinds"), [("llama", 1), ("qwen3", 1), ("gemma2", 2)])
def test_layers_share_graphs_and_no_request_makes_one(arch: str, num_kinds: int) -> None:
    compiler = Counter()
    is_done, runner = compiled(arch, compiler)
    assert is_done
    # The model and its two layers.
    assert num_rotating(runner) == 3
    assert compiler.num_graphs == 2 * num_kinds
    runs_of_the_trial = compiler.num_runs
    assert_equal_tokens(serve(runner, CROWDED, REQUESTS).token_ids, expected(arch))
    assert compiler.num_graphs == 2 * num_kinds
    assert compiler.num_runs >= runs_of_the_trial + 2 * 20


def test_what_torch_would_compile_anew_runs_as_before_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = Counter()
    _, runner = compiled("llama", compiler)
    serve(runner, CROWDED, {"1 tokens": REQUESTS["1 tokens"]})
    assert not told(caplog)
    before = compiler.num_graphs, compiler.num_runs
    # A guard of every graph.
    torch.set_default_dtype(torch.float64)
    try:
        served = serve(runner, CROWDED, REQUESTS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal_tokens(served.token_ids, expected("llama"))
    assert (compiler.num_graphs, compiler.num_runs) == before
    (record,) = told(caplog)
    assert "no graph fits" in record.getMessage()


def test_compiled_for_real_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    is_done, runner = compiled("llama", "inductor", tmp_path)
    assert is_done
    assert_equal_tokens(serve(runner, CROWDED, REQUESTS).token_ids, expected("llama"))
    assert list((tmp_path / CACHE_FOLDER).rglob("*.cpp"))
    assert CACHE_VARIABLE not in os.environ


def broken(*_: object) -> Any:
    raise RuntimeError("no compiler\nwas found")


@pytest.mark.parametrize(
    ("compiler", "reason"), [(Counter(wrong_by=0.1), "of the largest logit"), (broken, "no compiler")]
)
def test_what_fails_is_served_uncompiled(
    compiler: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        is_done, runner = compiled("llama", compiler)
    assert not is_done
    (record,) = told(caplog)
    assert "the model runs uncompiled" in record.getMessage()
    assert reason in record.getMessage()
    assert num_rotating(runner) == 2
    runs = getattr(compiler, "num_runs", 0)
    assert_equal_tokens(serve(runner, CROWDED, REQUESTS).token_ids, expected("llama"))
    assert getattr(compiler, "num_runs", 0) == runs


def test_packed_linears_are_called_from_a_graph() -> None:
    model, runner = ready("llama")
    calls: list[int] = []
    for place in [one for one in model.modules() if isinstance(one, torch.nn.Module)]:
        for name, child in list(place.named_children()):
            if type(child) is torch.nn.Linear and name == "down_proj":
                product = partial(_noted, calls, child)
                setattr(place, name, PackedLinear(child, [product] * 5))
    compiler = Counter()
    assert compile_layers(model, runner._backend, CROWDED, lambda _: None, cache_dir=None, compiler=compiler)
    assert compiler.num_graphs == 2
    calls.clear()
    assert_equal_tokens(serve(runner, CROWDED, REQUESTS).token_ids, expected("llama"))
    assert len(set(calls)) == 2


def _noted(calls: list[int], plain: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    calls.append(id(plain))
    return plain(hidden)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"quantization": "int8"}, "int8"),
        ({"compile": 1}, "true or false"),
    ],
)
def test_what_cannot_be_had_is_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as caught:
        build_execution("nowhere", device="cpu", **{"compile": True, **asked})
    assert caught.value.field == "compile"


@pytest.mark.parametrize("asked", [True, False])
def test_only_who_asks_gets_it(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Path | None] = []
    monkeypatch.setattr(numerics, "compile_layers", lambda *_, cache_dir: told.append(cache_dir))
    model, runner = ready("llama")
    backend = TORCH._replace(make=lambda *_: runner._backend)
    loaded: Any = SimpleNamespace(
        model=model, backend=backend, layers=(), dtype=model.dtype, device=model.device
    )
    compilation = numerics.Compilation(Path("kept")) if asked else None
    numerics.plain((), None, compilation=compilation).make_runner(loaded, CROWDED, lambda _: None)
    assert told == [Path("kept")] * asked
