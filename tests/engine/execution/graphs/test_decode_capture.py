"""Which decode steps are captured: sizes, self-checks, failures, devices and settings."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution import plans
from engine.execution.attention.interface import AttentionBatch, DecodeRows
from engine.execution.attention.torch_backend import TorchMetadata
from engine.execution.graphs.decode_graphs import graph_sizes, make_decode_graphs
from engine.execution.graphs.self_check import check_inputs
from engine.execution.loading.attention_backends import TORCH
from engine.execution.runner.model_runner import ModelRunner
from tests.comparer import reference
from tests.engine.execution.graphs.bench import (
    CROWDED,
    HOST_BOUND,
    PROMPTS,
    REQUESTS,
    SIX,
    DecodeMetadata,
    FunctionCapture,
    GraphableTorch,
    RecordedGraph,
    Recorder,
    graphable,
    graphed_runner,
)
from tests.engine.execution.serving import serve
from tests.tiny_models import make_model


def test_sizes() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(64) == (1, 2, 4, *range(8, 65, 8))
    assert graph_sizes(70)[-2:] == (64, 70)
    assert graph_sizes(300)[-5:] == (224, 240, 256, 288, 300)
    assert len(graph_sizes(1024)) < 50


@pytest.mark.parametrize("maximum", [1, 2, 5, 8, 9, 64, 65, 250, 1000])
def test_few_rows_are_padding(maximum: int) -> None:
    sizes = graph_sizes(maximum)
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, maximum + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, size / 8)


@pytest.mark.parametrize("arch", sorted(HOST_BOUND))
def test_a_model_that_waits_for_the_device_runs_without_graphs(
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


def test_a_step_has_no_more_rows_than_tokens() -> None:
    config = replace(SIX, max_num_batched_tokens=3)
    assert graphed_runner(make_model("llama"), config, Recorder()).graph_sizes == (1, 2, 3)


def test_the_largest_graph_is_captured_first_and_the_pool_stays_clean() -> None:
    messages: list[str] = []
    model, recorder = make_model("llama"), Recorder()
    backend = graphable(model, SIX)
    graphs = make_decode_graphs(model, backend, SIX, recorder, messages.append)
    assert graphs is not None
    assert messages[:4] == [f"capturing a decode graph of {size} rows" for size in (6, 4, 2, 1)]
    assert messages[4].startswith("decode graphs: 4, of 1 to 6 rows, ")
    for pool in (*backend.pool.keys, *backend.pool.values):
        assert not pool.nan_to_num().any()
        assert not pool[0].isnan().any()


class ConstantGraph(RecordedGraph):
    """A graph that keeps the results of its capture: a replay computes nothing."""

    def replay(self) -> None:
        self.num_replays += 1


def stale_capture(work: Callable[[], None]) -> RecordedGraph:
    work()
    return ConstantGraph()


class ShiftedLengths(GraphableTorch):
    """Its rows have the length of the next row."""

    def build_decode_metadata(self, rows: DecodeRows) -> DecodeMetadata:
        return super().build_decode_metadata(DecodeRows(rows.slot_mapping, rows.lengths.roll(1), rows.tables))


def failing_capture(_: Callable[[], None]) -> RecordedGraph:
    raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def capture_without_memory(_: Callable[[], None]) -> RecordedGraph:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (stale_capture, "differs from the forward pass"),
        (failing_capture, "operation not permitted"),
        (capture_without_memory, "out of memory"),
    ],
)
def test_after_a_failed_capture_a_model_runs_without_graphs(
    capture: Callable[[Callable[[], None]], RecordedGraph], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = graphed_runner(make_model("llama"), CROWDED, FunctionCapture(capture))
    assert runner.graph_sizes == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    served = serve(runner, CROWDED, {"r": REQUESTS["5 tokens"]})
    assert served.token_ids["r"] == reference(make_model("llama"), PROMPTS["5 tokens"], 20).token_ids


class LongerBesidePadding(GraphableTorch):
    """Its rows see one slot more if the last row is padding."""

    def build_decode_metadata(self, rows: DecodeRows) -> DecodeMetadata:
        return super().build_decode_metadata(
            DecodeRows(rows.slot_mapping, rows.lengths + (rows.slot_mapping[-1] == 0), rows.tables)
        )


@pytest.mark.parametrize("kind", [ShiftedLengths, LongerBesidePadding])
def test_the_self_check_detects_a_backend_that_decodes_wrongly(
    kind: type[GraphableTorch], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    backend = graphable(model, CROWDED)
    backend.__class__ = kind
    assert make_decode_graphs(model, backend, CROWDED, Recorder(), lambda _: None) is None
    assert "differs from the forward pass" in caplog.text


class StoresNothing(GraphableTorch):
    """Its graphs do not write keys and values."""

    def build_decode_metadata(self, rows: DecodeRows) -> DecodeMetadata:
        return super().build_decode_metadata(
            DecodeRows(torch.zeros_like(rows.slot_mapping), rows.lengths, rows.tables)
        )


def test_the_self_check_detects_a_graph_that_writes_no_keys_and_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = graphable(model := make_model("llama"), CROWDED)
    backend.__class__ = StoresNothing
    assert make_decode_graphs(model, backend, CROWDED, Recorder(), lambda _: None) is None
    assert "differs from the forward pass" in caplog.text


class CountingBackend(GraphableTorch):
    """Counts the forward passes that are not captured."""

    num_passes = 0

    def build_metadata(self, batch: AttentionBatch) -> TorchMetadata:
        self.num_passes += 1
        return super().build_metadata(batch)


def counting_backend(model: PreTrainedModel) -> CountingBackend:
    backend = graphable(model, SIX)
    backend.__class__ = CountingBackend
    assert isinstance(backend, CountingBackend)
    return backend


def test_all_graphs_are_checked_against_one_forward_pass() -> None:
    backend = counting_backend(model := make_model("llama"))
    graphs = make_decode_graphs(model, backend, SIX, Recorder(), lambda _: None)
    assert graphs is not None
    assert graphs.sizes == (1, 2, 4, 6)
    assert backend.num_passes == 1


def test_rows_whose_logits_depend_on_the_batch_size_are_checked_alone() -> None:
    """Rounding in a kernel for many rows may select another expert."""
    backend = counting_backend(model := make_model("llama"))

    def shift(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 100 * (logits.shape[-2] > 4)

    model.get_output_embeddings().register_forward_hook(shift)
    graphs = make_decode_graphs(model, backend, SIX, Recorder(), lambda _: None)
    assert graphs is not None
    assert graphs.sizes == (1, 2, 4, 6)
    assert backend.num_passes == 4


@pytest.mark.parametrize("first", [1, 2, 5, 99])
def test_fewer_rows_are_the_first_rows_of_the_same_step(first: int) -> None:
    config = EngineConfig(max_model_len=64, block_size=4, num_kv_blocks=20)
    whole, part = check_inputs(11, config, 8), check_inputs(11, config, 8, first=first)
    assert torch.equal(part.token_ids, whole.token_ids[:first])
    assert torch.equal(part.positions, whole.positions[:first])
    assert torch.equal(part.logits_rows, whole.logits_rows[:first])
    for mine, theirs in zip(part.batch.tensors, whole.batch.tensors, strict=True):
        assert torch.equal(mine, theirs[:first])


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "num_kv_blocks", "maximum"),
    [
        (2, 16, 1, 1),
        (3, 16, 9, 8),
        (7, 4, 9, 5),
        (64, 16, 3, 8),
        (64, 16, 40, 8),
        (5, 1, 4, 4),
        (100, 32, 100, 64),
    ],
)
def test_the_self_check_stays_within_the_limits(
    max_model_len: int, block_size: int, num_kv_blocks: int, maximum: int
) -> None:
    config = EngineConfig(max_model_len=max_model_len, block_size=block_size, num_kv_blocks=num_kv_blocks)
    inputs = check_inputs(11, config, maximum)
    batch, count = inputs.batch, len(inputs.token_ids)
    assert count == min(maximum, num_kv_blocks)
    assert batch.decode_tables.shape[1] <= -(-max_model_len // block_size)
    assert 0 <= int(inputs.positions.min()) <= int(inputs.positions.max()) < max_model_len
    assert int(inputs.token_ids.max()) < 11
    blocks = batch.decode_tables.flatten().tolist()
    assert len(set(blocks)) == len(blocks)
    assert 1 <= min(blocks) <= max(blocks) <= num_kv_blocks
    assert [slot // block_size for slot in batch.slot_mapping.tolist()] == [
        table[position // block_size]
        for table, position in zip(batch.decode_tables.tolist(), inputs.positions.tolist(), strict=True)
    ]
    assert (batch.slot_mapping % block_size).tolist() == (inputs.positions % block_size).tolist()


def loaded(model: Any, device: str, backend: type[GraphableTorch] | Any) -> Any:
    """A stand-in for a loaded model on a device that does not exist."""
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
        ("cpu", GraphableTorch, True, (1, 2, 4)),
        ("cpu", GraphableTorch, False, ()),
        ("cpu", TORCH, True, ()),
    ],
)
def test_graphs_are_for_backends_that_allow_them(
    device: str, backend: Any, has_graphs: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "CudaCapture", lambda _: Recorder())
    messages: list[str] = []
    made = plans.plain((), None, has_graphs=has_graphs)
    runner = made.make_runner(loaded(make_model("llama"), device, backend), CROWDED, messages.append)
    assert isinstance(runner, ModelRunner)
    assert runner.graph_sizes == sizes
    assert (
        messages == ["decode graphs: none, as torch attention cannot be captured"] * (backend is TORCH)
        or sizes
    )


def test_deterministic_mode_never_uses_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(plans, "CudaCapture", refuse)
    monkeypatch.setattr(plans, "make_decode_graphs", refuse)
    monkeypatch.setattr(plans, "agreeing_row_counts", lambda *_, **__: (1, 4))
    model = make_model("llama")
    monkeypatch.setattr(plans, "DeterministicAttention", lambda *_: graphable(model, CROWDED))
    runner = plans.DETERMINISTIC.make_runner(loaded(model, "cuda", GraphableTorch), CROWDED, lambda _: None)
    assert runner._runner.graph_sizes == ()  # type: ignore[attr-defined]
