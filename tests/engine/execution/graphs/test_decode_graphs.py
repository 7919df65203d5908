"""Replayed decode steps return what the forward pass returns; other steps run without graphs."""

from typing import Any

import pytest
import torch

from engine.execution.graphs.decode_graphs import DecodeGraphs
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.runner.synthetic_steps import null_inputs
from engine.outputs import SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.comparer import assert_equal_tokens, reference
from tests.engine.execution.graphs.bench import (
    CROWDED,
    HOST_BOUND,
    PROMPTS,
    REQUESTS,
    SIX,
    CannotCapture,
    FunctionCapture,
    GraphableTorch,
    RecordedGraph,
    Recorder,
    graphed_runner,
)
from tests.engine.execution.serving import in_slot, make_prompts, part, serve
from tests.tiny_models import ARCHITECTURES, make_model


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in HOST_BOUND])
def test_tokens_of_graphs_equal_generate(arch: str) -> None:
    recorder = Recorder()
    runner = graphed_runner(make_model(arch), CROWDED, recorder)
    recorded = recorder.num_replays
    served = serve(runner, CROWDED, REQUESTS)
    assert runner.graph_sizes == (1, 2, 4)
    assert all(graph.num_replays > 1 for graph in recorder.graphs)
    assert recorder.num_replays - recorded > 20
    assert served.num_preempted > 0
    model = make_model(arch)
    expected = {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}
    assert_equal_tokens(served.token_ids, expected)


class Bench:
    """Six sequences of different lengths whose prompts are computed."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.model = make_model("llama")
        self.runner = graphed_runner(self.model, SIX, self.recorder)
        self.backend: GraphableTorch = self.runner._backend  # type: ignore[assignment]
        self.eager = ModelRunner(self.model, self.backend, InputBuilder(6, 128, 4))
        prompts = list(make_prompts((3, 4, 5, 8, 15, 30)).values())
        blocks = iter(range(1, 61))
        self.sequences = [
            in_slot(slot, prompt, [next(blocks) for _ in range(-(-len(prompt) // 4))])
            for slot, prompt in enumerate(prompts)
        ]
        for one in self.sequences:
            self.eager.execute(SchedulerOutputs(prefill=(part(one, 0, one.num_tokens - 1),)))

    def inputs(self, who: list[int], logits_from: dict[int, int] | None = None) -> StepInputs:
        items = tuple(self.last(self.sequences[one], (logits_from or {}).get(one, 0)) for one in who)
        return InputBuilder(6, 128, 4).build(SchedulerOutputs(decode=items))

    @staticmethod
    def last(one: Sequence, logits_from: int = 0) -> Any:
        return part(one, one.num_tokens - 1, one.num_tokens, logits_from)

    def pools(self) -> list[torch.Tensor]:
        pool = self.backend.pool
        return [tensor.clone() for tensor in (*pool.keys, *pool.values)]


@pytest.mark.parametrize("count", range(1, 7))
def test_a_replay_returns_the_logits_of_the_forward_pass(count: int) -> None:
    bench = Bench()
    inputs = bench.inputs(list(range(6))[-count:])
    with torch.inference_mode():
        expected = bench.eager.forward(inputs)
        before = bench.recorder.num_replays
        found = bench.runner.forward(inputs)
        assert bench.recorder.num_replays == before + 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_padding_rows_change_nothing() -> None:
    """In vllm#35541, the contents of padding rows leaked into real rows.

    Three rows run in the graph of four rows after the fourth held a real row, garbage, or padding; the bits
    are the same. Only their own slots and the padding slot are written.
    """
    bench = Bench()
    inputs = bench.inputs([0, 3, 5])
    graphs = bench.runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    with torch.inference_mode():
        fresh = graphs.replay(inputs)
        graphs.replay(bench.inputs([1, 2, 4, 0]))
        after_real_rows = graphs.replay(inputs)
        graphs._buffers._fields.fill_(3)
        graphs._buffers._tables.fill_(59)
        before = bench.pools()
        after_garbage = graphs.replay(inputs)
    assert torch.equal(fresh, after_real_rows)
    assert torch.equal(fresh, after_garbage)
    begun = set(inputs.batch.blocks_begun.tolist())
    for old, new in zip(before, bench.pools(), strict=True):
        changed = ((old != new) & ~(old.isnan() & new.isnan())).flatten(2).any(-1).nonzero().tolist()
        slots = {block * 4 + offset for block, offset in changed if block not in begun}
        assert slots <= {0, *inputs.batch.slot_mapping.tolist()}


def test_only_requested_logits_are_returned() -> None:
    bench = Bench()
    inputs = bench.inputs([0, 1, 2], {1: 1})
    with torch.inference_mode():
        expected = bench.eager.forward(inputs)
        found = bench.runner.forward(inputs)
        assert bench.runner.forward(bench.inputs([0, 1], {0: 1, 1: 1})).shape == (0, found.shape[1])
    assert found.shape[0] == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_logits_are_the_callers_own() -> None:
    bench = Bench()
    with torch.inference_mode():
        first = bench.runner.forward(bench.inputs([0, 1]))
        kept = first.clone()
        second = bench.runner.forward(bench.inputs([4, 5]))
    assert not torch.equal(first, second)
    assert torch.equal(first, kept)


def test_only_decode_steps_are_supported() -> None:
    bench = Bench()
    graphs = bench.runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    builder = InputBuilder(6, 128, 4)
    first, second = bench.sequences[:2]
    mixed = SchedulerOutputs(decode=(bench.last(first),), prefill=(part(second, 0, 3),))
    assert not graphs.supports(builder.build(mixed))
    assert not graphs.supports(builder.build(SchedulerOutputs()))
    assert graphs.supports(bench.inputs([0, 1, 2, 3, 4, 5]))
    assert graphs.supports(null_inputs())
    fewer = DecodeGraphs(graphs._buffers, graphs._logits, {2: RecordedGraph()})
    assert fewer.supports(bench.inputs([0, 1]))
    assert not fewer.supports(bench.inputs([0, 1, 2]))


class Poisoned(RecordedGraph):
    """Fails whenever one of its rows is the token `poison`, and once without a reason."""

    def __init__(self, graph: RecordedGraph, token_ids: torch.Tensor, poison: int) -> None:
        self._graph, self._token_ids, self._poison = graph, token_ids, poison
        self.has_failed_once = False

    def replay(self) -> None:
        if bool((self._token_ids == self._poison).any()):
            raise RuntimeError("poison")
        if not self.has_failed_once and len(self._token_ids) > 1:
            self.has_failed_once = True
            raise RuntimeError("once")
        self._graph.replay()


def test_a_failed_replay_is_a_failed_step() -> None:
    """Only the request that causes the failure ends; a step that fails once is repeated."""
    model = make_model("llama")
    expected = {name: reference(model, prompt, 20).token_ids for name, prompt in PROMPTS.items()}
    poison = expected["17 tokens"][7]
    position = expected["17 tokens"].index(poison)
    healthy = [name for name in ("1 tokens", "5 tokens", "33 tokens") if poison not in expected[name]]
    assert len(healthy) >= 2
    runner = graphed_runner(make_model("llama"), SIX, Recorder())
    graphs = runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    graphs._graphs = {
        size: Poisoned(graph, graphs._buffers.first(size).token_ids, poison)  # type: ignore[arg-type]
        for size, graph in graphs._graphs.items()
    }
    served = serve(runner, SIX, {name: REQUESTS[name] for name in [*healthy, "17 tokens"]})
    assert list(served.errors) == ["17 tokens"]
    assert "RuntimeError: poison" in served.errors["17 tokens"]
    assert served.token_ids["17 tokens"] == expected["17 tokens"][: position + 1]
    assert {name: served.token_ids[name] for name in healthy} == {name: expected[name] for name in healthy}


def refuse(_: object) -> RecordedGraph:
    raise CannotCapture("not here")


def test_sampled_tokens_are_the_same_with_graphs() -> None:
    random = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=5, repetition_penalty=1.2)
    requests = {name: (prompt, random) for name, prompt in PROMPTS.items()}
    with_graphs = serve(graphed_runner(make_model("llama"), CROWDED, Recorder()), CROWDED, requests)
    without = serve(graphed_runner(make_model("llama"), CROWDED, FunctionCapture(refuse)), CROWDED, requests)
    assert with_graphs.token_ids == without.token_ids


def test_check_replays_a_graph() -> None:
    """Otherwise a device whose graphs all fail would pass, and every request would be blamed."""
    recorder = Recorder()
    runner = graphed_runner(make_model("llama"), CROWDED, recorder)
    before = recorder.num_replays
    runner.check()
    assert recorder.num_replays == before + 1
    backend: GraphableTorch = runner._backend  # type: ignore[assignment]
    assert all(not pool[0].any() for pool in (*backend.pool.keys, *backend.pool.values))
