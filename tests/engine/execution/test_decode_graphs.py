"""Decode steps by graphs give what the forward pass gives; what cannot be captured is served without."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution import numerics
from engine.execution.attention import DecodeRows
from engine.execution.attention_choice import TORCH
from engine.execution.decode_graphs import DecodeGraphs, graph_sizes, make_decode_graphs
from engine.execution.decode_trial import trial_inputs
from engine.execution.inputs import InputBuilder, StepInputs, null_inputs
from engine.execution.model_runner import ModelRunner
from engine.outputs import SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.comparer import assert_equal_tokens, reference
from tests.engine.execution.graphs import (
    DecodeStep,
    GraphableTorch,
    RecordedGraph,
    Recorder,
    graphable,
    graphed_runner,
)
from tests.engine.execution.serving import GREEDY, make_prompts, part, seated, serve
from tests.tiny_models import ARCHITECTURES, make_model

PROMPTS = make_prompts((1, 5, 17, 33, 40, 64))
REQUESTS = {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
# Blocks for 120 tokens where the requests want 280, and a graph of four rows that three often fill.
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)
SIX = replace(CROWDED, max_num_seqs=6, num_kv_blocks=60)
HOST_BOUND = {"gpt2"}
"""These read a tensor on the host in each forward."""


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in HOST_BOUND])
def test_a_generation_by_graphs_equals_generate(arch: str) -> None:
    recorder = Recorder()
    runner = graphed_runner(make_model(arch), CROWDED, recorder)
    recorded = recorder.num_replays
    served = serve(runner, CROWDED, REQUESTS)
    assert runner.graph_sizes == (1, 2, 4)
    assert all(graph.num_replays > 1 for graph in recorder.graphs)
    assert recorder.num_replays - recorded > 20
    assert served.num_preempted > 0
    model = make_model(arch)
    right = {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}
    assert_equal_tokens(served.token_ids, right)


@pytest.mark.parametrize("arch", sorted(HOST_BOUND))
def test_a_model_that_reads_on_the_host_is_served_without_graphs(
    arch: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = graphed_runner(make_model(arch), CROWDED, Recorder())
    assert runner.graph_sizes == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "decode steps run without graphs" in record.getMessage()
    assert "not permitted when the stream is capturing" in record.getMessage()
    served = serve(runner, CROWDED, {"r": REQUESTS["5 tokens"]})
    assert served.token_ids["r"] == reference(make_model(arch), PROMPTS["5 tokens"], 20).token_ids


def test_sizes() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(64) == (1, 2, 4, *range(8, 65, 8))
    assert graph_sizes(70)[-2:] == (64, 70)
    assert graph_sizes(300)[-5:] == (224, 240, 256, 288, 300)
    assert len(graph_sizes(1024)) < 50


@pytest.mark.parametrize("most", [1, 2, 5, 8, 9, 64, 65, 250, 1000])
def test_few_rows_are_nobodys(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, size / 8)


class Bench:
    """Six sequences of different lengths whose prompts are computed; their next tokens are decoded."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.model = make_model("llama")
        self.runner = graphed_runner(self.model, SIX, self.recorder)
        self.backend: GraphableTorch = self.runner._backend  # type: ignore[assignment]
        self.eager = ModelRunner(self.model, self.backend, InputBuilder(6, 128, 4))
        prompts = list(make_prompts((3, 4, 5, 8, 15, 30)).values())
        blocks = iter(range(1, 61))
        self.sequences = [
            seated(seat, prompt, [next(blocks) for _ in range(-(-len(prompt) // 4))])
            for seat, prompt in enumerate(prompts)
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
def test_a_replay_gives_the_forward_pass(count: int) -> None:
    bench = Bench()
    inputs = bench.inputs(list(range(6))[-count:])
    with torch.inference_mode():
        right = bench.eager.forward(inputs)
        before = bench.recorder.num_replays
        found = bench.runner.forward(inputs)
        assert bench.recorder.num_replays == before + 1
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_rows_of_nobody_change_nothing() -> None:
    """vllm#35541 and its like: what stands in the rows that fill a graph up leaked into real rows.

    Three rows in the graph of four, after the fourth held a real row, garbage, or nobody; the same bits.
    Beside their own slots only that of nobody is written.
    """
    bench = Bench()
    inputs = bench.inputs([0, 3, 5])
    graphs = bench.runner._graphs
    assert graphs is not None
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
        assert slots <= {0, *inputs.batch.slots.tolist()}


def test_only_wanted_logits_come_back() -> None:
    bench = Bench()
    inputs = bench.inputs([0, 1, 2], {1: 1})
    with torch.inference_mode():
        right = bench.eager.forward(inputs)
        found = bench.runner.forward(inputs)
        assert bench.runner.forward(bench.inputs([0, 1], {0: 1, 1: 1})).shape == (0, found.shape[1])
    assert found.shape[0] == 2
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_logits_are_the_callers_own() -> None:
    bench = Bench()
    with torch.inference_mode():
        first = bench.runner.forward(bench.inputs([0, 1]))
        kept = first.clone()
        second = bench.runner.forward(bench.inputs([4, 5]))
    assert not torch.equal(first, second)
    assert torch.equal(first, kept)


def test_other_steps_are_not_taken() -> None:
    bench = Bench()
    graphs = bench.runner._graphs
    assert graphs is not None
    builder = InputBuilder(6, 128, 4)
    first, second = bench.sequences[:2]
    mixed = SchedulerOutputs(decode=(bench.last(first),), prefill=(part(second, 0, 3),))
    assert not graphs.takes(builder.build(mixed))
    assert not graphs.takes(builder.build(SchedulerOutputs()))
    assert graphs.takes(bench.inputs([0, 1, 2, 3, 4, 5]))
    assert graphs.takes(null_inputs())
    fewer = DecodeGraphs(graphs._buffers, graphs._logits, {2: RecordedGraph()})
    assert fewer.takes(bench.inputs([0, 1]))
    assert not fewer.takes(bench.inputs([0, 1, 2]))


def test_a_step_has_no_more_rows_than_tokens() -> None:
    config = replace(SIX, max_num_batched_tokens=3)
    assert graphed_runner(make_model("llama"), config, Recorder()).graph_sizes == (1, 2, 3)


def test_the_largest_is_captured_first_and_the_pool_is_left_clean() -> None:
    model, told, recorder = make_model("llama"), [], Recorder()
    backend = graphable(model, SIX)
    graphs = make_decode_graphs(model, backend, SIX, recorder, told.append)
    assert graphs is not None
    assert told[:4] == [
        f"capturing decode graph {number} of 4, {size} rows" for number, size in enumerate((6, 4, 2, 1), 1)
    ]
    assert told[4].startswith("decode graphs: 4, of 1 to 6 rows, ")
    for pool in (*backend.pool.keys, *backend.pool.values):
        assert not pool.nan_to_num().any()
        assert not pool[0].isnan().any()


class Forgetful(RecordedGraph):
    """A graph that keeps what its capture read: a replay computes nothing."""

    def replay(self) -> None:
        self.num_replays += 1


def stale(work: Callable[[], None]) -> RecordedGraph:
    work()
    return Forgetful()


class LooksAtNobody(GraphableTorch):
    """Its rows see the tokens of the next row too."""

    def begin_decode(self, rows: DecodeRows) -> DecodeStep:
        return super().begin_decode(DecodeRows(rows.slots, rows.lengths.roll(1), rows.tables))


def failing(_: Callable[[], None]) -> RecordedGraph:
    raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def without_memory(_: Callable[[], None]) -> RecordedGraph:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (stale, "differs from the forward pass"),
        (failing, "operation not permitted"),
        (without_memory, "out of memory"),
    ],
)
def test_what_cannot_be_captured_is_served_without(
    capture: Callable[[Callable[[], None]], RecordedGraph], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = graphed_runner(make_model("llama"), CROWDED, capture)
    assert runner.graph_sizes == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    served = serve(runner, CROWDED, {"r": REQUESTS["5 tokens"]})
    assert served.token_ids["r"] == reference(make_model("llama"), PROMPTS["5 tokens"], 20).token_ids


def test_a_backend_that_decodes_wrongly_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    backend = graphable(model, CROWDED)
    backend.__class__ = LooksAtNobody
    assert make_decode_graphs(model, backend, CROWDED, Recorder(), lambda _: None) is None
    assert "differs from the forward pass" in caplog.text


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "num_kv_blocks", "most"),
    [(2, 16, 1, 1), (7, 4, 9, 5), (64, 16, 3, 8), (64, 16, 40, 8), (5, 1, 4, 4), (100, 32, 100, 64)],
)
def test_the_trial_stays_within_the_limits(
    max_model_len: int, block_size: int, num_kv_blocks: int, most: int
) -> None:
    config = EngineConfig(max_model_len=max_model_len, block_size=block_size, num_kv_blocks=num_kv_blocks)
    inputs = trial_inputs(11, config, most)
    batch, count = inputs.batch, len(inputs.token_ids)
    assert count == min(most, num_kv_blocks)
    assert batch.single_tables.shape[1] <= -(-max_model_len // block_size)
    assert 0 <= int(inputs.positions.min()) <= int(inputs.positions.max()) < max_model_len
    assert int(inputs.token_ids.max()) < 11
    blocks = batch.single_tables.flatten().tolist()
    assert len(set(blocks)) == len(blocks)
    assert 1 <= min(blocks) <= max(blocks) <= num_kv_blocks
    assert [slot // block_size for slot in batch.slots.tolist()] == [
        table[position // block_size]
        for table, position in zip(batch.single_tables.tolist(), inputs.positions.tolist(), strict=True)
    ]
    assert (batch.slots % block_size).tolist() == (inputs.positions % block_size).tolist()


class Poisoned(RecordedGraph):
    """Fails whenever one of its rows is the token `poison`, and once for nothing."""

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


def test_a_replay_that_fails_is_a_step_that_fails() -> None:
    """The guilty request ends alone; those beside it have their tokens, after a failure of a whole step too."""
    model = make_model("llama")
    right = {name: reference(model, prompt, 20).token_ids for name, prompt in PROMPTS.items()}
    poison = right["17 tokens"][7]
    place = right["17 tokens"].index(poison)
    healthy = [name for name in ("1 tokens", "5 tokens", "33 tokens") if poison not in right[name]]
    assert len(healthy) >= 2
    runner = graphed_runner(make_model("llama"), SIX, Recorder())
    graphs = runner._graphs
    assert graphs is not None
    graphs._graphs = {
        size: Poisoned(graph, graphs._buffers.first(size).token_ids, poison)  # type: ignore[arg-type]
        for size, graph in graphs._graphs.items()
    }
    served = serve(runner, SIX, {name: REQUESTS[name] for name in [*healthy, "17 tokens"]})
    assert list(served.errors) == ["17 tokens"]
    assert "RuntimeError: poison" in served.errors["17 tokens"]
    assert served.token_ids["17 tokens"] == right["17 tokens"][: place + 1]
    assert {name: served.token_ids[name] for name in healthy} == {name: right[name] for name in healthy}


def test_random_requests_by_graphs_have_their_tokens() -> None:
    random = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=5, repetition_penalty=1.2)
    requests = {name: (prompt, random) for name, prompt in PROMPTS.items()}
    with_graphs = serve(graphed_runner(make_model("llama"), CROWDED, Recorder()), CROWDED, requests)
    without = serve(graphed_runner(make_model("llama"), CROWDED, failing), CROWDED, requests)
    assert with_graphs.token_ids == without.token_ids


def test_check_runs_what_serves() -> None:
    """Else a device whose graphs all fail would be called sound, and every request guilty."""
    recorder = Recorder()
    runner = graphed_runner(make_model("llama"), CROWDED, recorder)
    before = recorder.num_replays
    runner.check()
    assert recorder.num_replays == before + 1
    backend: GraphableTorch = runner._backend  # type: ignore[assignment]
    assert all(not pool[0].any() for pool in (*backend.pool.keys, *backend.pool.values))


def loaded(model: Any, device: str, backend: type[GraphableTorch] | Any) -> Any:
    """What a loader gives, of a device that is not there."""
    made = graphable(model, CROWDED)
    if backend is TORCH:
        made.__class__ = TORCH.make
    fake = TORCH._replace(make=lambda *_: made)
    layers = ()
    return SimpleNamespace(
        model=model, backend=fake, layers=layers, dtype=model.dtype, device=torch.device(device)
    )


@pytest.mark.parametrize(
    ("device", "backend", "has_graphs", "sizes"),
    [
        ("cuda", GraphableTorch, True, (1, 2, 4)),
        ("cuda", GraphableTorch, False, ()),
        ("cuda", TORCH, True, ()),
        ("cpu", GraphableTorch, True, ()),
    ],
)
def test_graphs_are_for_cuda_and_backends_that_allow_them(
    device: str, backend: Any, has_graphs: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "CudaCapture", lambda _: Recorder())
    told: list[str] = []
    made = numerics.plain((), has_graphs=has_graphs)
    runner = made.make_runner(loaded(make_model("llama"), device, backend), CROWDED, told.append)
    assert isinstance(runner, ModelRunner)
    assert runner.graph_sizes == sizes
    assert (
        told == ["decode graphs: none, as torch attention cannot be captured"] * (backend is TORCH) or sizes
    )


def test_deterministic_mode_never_uses_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(numerics, "CudaCapture", refuse)
    monkeypatch.setattr(numerics, "make_decode_graphs", refuse)
    monkeypatch.setattr(numerics, "agreeing_row_counts", lambda *_, **__: (1, 4))
    monkeypatch.setattr(numerics, "DeterministicAttention", lambda *_: graphable(model, CROWDED))
    model = make_model("llama")
    runner = numerics.DETERMINISTIC.make_runner(
        loaded(model, "cuda", GraphableTorch), CROWDED, lambda _: None
    )
    assert runner._runner.graph_sizes == ()  # type: ignore[attr-defined]
