"""Captured decode steps on a CPU: the same tokens, and work that cannot be recorded is refused."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from engine.execution import plans
from engine.execution.attention.interface import ATTENTION_NAME, PoolShape, install
from engine.execution.attention.native_backend import NativeAttention
from engine.execution.attention.probe import record_layers
from engine.execution.graphs.cpu_capture import CannotCapture, CpuCapture
from engine.execution.graphs.decode_graphs import DecodeGraphs, make_decode_graphs
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner
from tests.comparer import Reference, assert_equal_tokens, reference
from tests.engine.execution.graphs.bench import CROWDED, HOST_BOUND, PROMPTS, REQUESTS, SIX
from tests.engine.execution.pools import attention_operator, cpu_shape, native_library
from tests.engine.execution.serving import serve
from tests.tiny_models import ARCHITECTURES, make_model

aten = torch.ops.aten


@cache
def expected(arch: str) -> dict[str, Reference]:
    model = make_model(arch)
    return {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}


def captured(arch: str, config: Any = CROWDED, dtype: torch.dtype = torch.float32) -> ModelRunner:
    """A runner as a CPU worker makes it. The pool starts full of NaN."""
    install()
    model = make_model(arch, dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    library = native_library()
    plans.plain((), library).prepare(model)
    shape = cpu_shape(record_layers(model), config.num_kv_blocks + 1, config.block_size, dtype)
    backend = NativeAttention(attention_operator(), shape)
    for layer in backend.pool.layers:
        layer.fill_(torch.nan)
    backend.zero_blocks((0,))
    graphs = make_decode_graphs(model, backend, config, CpuCapture(library), lambda _: None)
    inputs = InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)
    return ModelRunner(model, backend, inputs, graphs)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_generate(arch: str) -> None:
    runner = captured(arch)
    assert bool(runner.graph_sizes) == (arch not in HOST_BOUND)
    served = serve(runner, CROWDED, REQUESTS)
    assert served.num_preempted > 0
    assert_equal_tokens(served.token_ids, expected(arch))


def test_bfloat16_has_the_bits_of_the_forward_pass() -> None:
    with_graphs = captured("llama", dtype=torch.bfloat16)
    without = ModelRunner(
        with_graphs._model, with_graphs._backend, InputBuilder(4, 128, CROWDED.block_size), None
    )
    assert with_graphs.graph_sizes
    tokens = [serve(runner, CROWDED, REQUESTS).token_ids for runner in (with_graphs, without)]
    assert tokens[0] == tokens[1]


def test_a_model_that_reads_on_the_host_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    assert captured("gpt2").graph_sizes == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "depends on the content of a tensor" in record.getMessage()


def test_no_module_runs_in_a_replay() -> None:
    runner = captured("llama", SIX)
    calls: list[object] = []
    for module in runner._model.modules():
        module.register_forward_pre_hook(lambda module, _: calls.append(module))
    prompts = {name: REQUESTS[name] for name in ("5 tokens", "17 tokens")}
    serve(runner, SIX, prompts)
    # Two prompts in one step or two; the other steps are decodes.
    assert 0 < calls.count(runner._model) <= 2


def silently(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        work()

    return run


def replayed(work: Callable[[torch.Tensor], torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Capture with the first input and replay with each of them."""
    source, output = inputs[0].clone(), work(inputs[0].clone()).clone()
    graph = CpuCapture(None)(silently(lambda: output.copy_(work(source))))
    outputs = []
    for one in inputs:
        source.copy_(one)
        output.zero_()
        graph.replay()
        outputs.append(output.clone())
    return outputs


def in_place(x: torch.Tensor) -> torch.Tensor:
    counted = torch.zeros(3)
    counted[1] += x.sum()
    counted.mul_(2)
    return counted


TABLE = torch.arange(10.0).view(5, 2)
PACKED = torch.ops.mkldnn._reorder_linear_weight(torch.randn(3, 4))


def multiply_by_onednn(x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, PACKED, None, "none", [], "")
    return product


WORKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with an out variant": lambda x: x + 1,
    "without an out variant": lambda x: torch.nn.functional.embedding(x.long().clamp(0, 4), TABLE),
    "views": lambda x: (x.view(2, -1).t()[1:] * 2).flatten(),
    "in place, on an intermediate result": in_place,
    "several results": lambda x: x.sort().values + x.topk(1).values,
    "a host number": lambda x: x * len(x) + torch.arange(len(x)),
    "indexed by numbers": lambda x: x[torch.tensor([2, 0])],
    "copies of views": lambda x: x.view(2, -1).t().contiguous().reshape(-1),
    "undeclared views": lambda x: aten._unsafe_view(x, [2, -1]).sum(0) * 2,
    "lists": lambda x: torch.cat([*x.split(2)[::-1], *aten.unbind_copy(x.view(2, -1))]),
    "a weight that oneDNN packed": lambda x: multiply_by_onednn(x[None])[0] + 1,
    "an empty tensor": lambda x: torch.cat([x[:0], x, x.new_empty(0)]),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_replay_reads_the_current_inputs(name: str) -> None:
    work = WORKS[name]
    inputs = [torch.tensor(one) for one in ([1.0, 2, 3, 4], [4.0, 3, 2, 1], [0.0, -5, 7, 2])]
    with torch.inference_mode():
        assert all(map(torch.equal, replayed(work, *inputs), map(work, inputs)))


def test_views_and_unwritten_memory_are_not_recorded() -> None:
    x = torch.ones(2, 6)
    with torch.inference_mode():
        views = (lambda: x.t()[1:].unsqueeze(0), lambda: x.view(3, 4), lambda: aten._unsafe_view(x, [3, 4]))
        graph = CpuCapture(None)(silently(lambda: (x.new_empty(9), *(view() for view in views))))
    assert graph.calls == []


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "a branch": lambda x: x.sum() > 0 and x,
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask of bytes": lambda x: x[(x > 0).byte()],
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", REFUSED)
def test_work_that_depends_on_the_content_of_a_tensor_is_refused(name: str) -> None:
    x = torch.ones(3)
    with torch.inference_mode(), pytest.raises(CannotCapture, match="depends on the content of a tensor"):
        CpuCapture(None)(silently(lambda: REFUSED[name](x)))


def test_work_that_packs_a_weight_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(CannotCapture, match="is not strided"):
        CpuCapture(None)(silently(lambda: torch.ops.mkldnn._reorder_linear_weight(torch.ones(3, 4))))


def test_a_graph_keeps_the_memory_of_its_calls() -> None:
    """Later allocations do not overwrite it."""
    x = torch.ones(1000)
    out = torch.zeros(1000)
    with torch.inference_mode():
        graph = CpuCapture(None)(silently(lambda: out.copy_((x + 1) * 3 - 2)))
        for value in range(50):
            torch.full((1000,), float(value))
        others = [torch.full((1000,), float(value)) for value in range(50)]
        graph.replay()
    assert bool((out == 4).all())
    assert [int(one[0]) for one in others] == list(range(50))


def test_regions_are_reused_within_and_between_graphs() -> None:
    x, out = torch.ones(1024), torch.zeros(1024)

    def work() -> None:
        step = x
        for _ in range(20):
            step = (step + 1).view(2, -1).flatten()
        out.copy_(step)

    capture = CpuCapture(None)
    with torch.inference_mode():
        graphs = [capture(work) for _ in range(3)]
        for graph in graphs:
            out.zero_()
            graph.replay()
            assert bool((out == 21).all())
    assert capture.num_bytes == 2 * x.nbytes


def test_a_tensor_that_outlives_its_capture_keeps_its_contents() -> None:
    """Such as a mask that a model computes once."""
    x, out = torch.arange(8.0), torch.zeros(8)
    remembered: list[torch.Tensor] = []

    def work() -> None:
        if not remembered:
            remembered.append(torch.full((8,), 10.0)[:4])
        out.copy_(x * 2 + remembered[0].repeat(2))

    capture = CpuCapture(None)
    with torch.inference_mode():
        graphs = [capture(work) for _ in range(3)]
        for graph in [*graphs, *reversed(graphs)]:
            out.zero_()
            graph.replay()
            assert torch.equal(out, x * 2 + 10)
            assert remembered[0].tolist() == [10.0] * 4


def test_native_calls_are_recorded_instead_of_made_during_a_capture_only() -> None:
    library = native_library()
    operator, weight = LinearOperator(library), torch.randn(16, 4)
    packed = []
    with torch.inference_mode():
        graph = CpuCapture(library)(silently(lambda: packed.append(operator.pack(weight))))
        assert not packed[0].panels.any()
        graph.replay()
        assert torch.equal(packed[0].panels, operator.pack(weight).panels)
    num_calls = len(graph.calls)
    with pytest.raises(ZeroDivisionError):
        CpuCapture(library)(silently(lambda: 1 / 0))
    assert operator.pack(weight).panels.any()
    assert len(graph.calls) == num_calls
    assert CpuCapture(library)(lambda: None).calls == []


def test_native_functions_that_return_a_value_are_called_during_a_capture() -> None:
    library = native_library()
    numel = library.function("tokenmill_linear_numel_float32", [ctypes.c_int64] * 2, ctypes.c_int64)
    sizes = []
    graph = CpuCapture(library)(silently(lambda: sizes.append(numel(3, 5))))
    assert sizes == [numel(3, 5)] != [0]
    assert graph.calls == []


def test_a_native_operator_without_memory_raises() -> None:
    graph = CpuCapture(None)(lambda: None)
    graph.calls.append(lambda: 0)
    graph.calls.append(lambda: None)
    graph.replay()
    graph.calls.append(lambda: 1)
    with pytest.raises(MemoryError, match="could not allocate memory"):
        graph.replay()


def test_sizes_are_captured_in_ascending_order_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.graphs.cpu_capture.MAX_BYTES", 8_192)
    capture = CpuCapture(None)
    found = []
    with torch.inference_mode():
        for size in capture.order((1, 2, 4, 8, 16)):
            found.append(size)
            x = torch.ones(size, 256)
            capture(silently(partial(torch.add, x, 1)))
    # 1,024 bytes a row, and all use the same.
    assert found == [1, 2, 4, 8]
    assert capture.num_bytes == 8_192


def test_little_memory_leads_to_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.graphs.cpu_capture.MAX_BYTES", 1)
    runner = captured("llama")
    assert runner.graph_sizes == (1,)
    assert_equal_tokens(serve(runner, CROWDED, REQUESTS).token_ids, expected("llama"))


def test_padding_rows_write_to_the_null_block_only() -> None:
    runner = captured("llama", replace(SIX, num_kv_blocks=8, max_num_seqs=3))
    graphs = runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    backend: NativeAttention = runner._backend  # type: ignore[assignment]
    shape: PoolShape = backend.pool.shape
    with torch.inference_mode():
        graphs._buffers.clear()
        backend.zero_blocks(tuple(range(shape.num_blocks)))
        graphs._graphs[3].replay()
        written = [layer.nan_to_num().any().item() for layer in backend.pool.layers]
        backend.zero_blocks((0,))
        left = [layer.nan_to_num().any().item() for layer in backend.pool.layers]
    assert all(written)
    assert not any(left)
