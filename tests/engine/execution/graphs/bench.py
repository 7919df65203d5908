"""Device graphs simulated on a CPU: records torch operators of a backend that supports graphs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import ATTENTION_NAME, DecodeRows, LayerCall, install
from engine.execution.attention.probe import record_layers
from engine.execution.attention.torch_backend import TorchAttention, _attend_decode_rows
from engine.execution.graphs.decode_graphs import Capture, make_decode_graphs
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner
from tests.engine.execution.pools import cpu_shape
from tests.engine.execution.serving import GREEDY, make_prompts

PROMPTS = make_prompts((1, 5, 17, 33, 40, 64))
REQUESTS = {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
# Blocks for 120 tokens where the requests want 280, and a graph of four rows that three often fill.
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)
SIX = replace(CROWDED, max_num_seqs=6, num_kv_blocks=60)
HOST_BOUND = {"gpt2"}
"""These read a tensor on the host in each forward pass."""

aten = torch.ops.aten
READS_ON_THE_HOST = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
}
"""Operators that a device refuses during a capture."""


class CannotCapture(Exception):
    """CUDA's error for an operator that makes the host wait."""


class RecordedGraph:
    """Operators with their tensors. A replay runs them again on the same tensors."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for operator, args, kwargs, results in self.operators:
            again, _ = tree_flatten(operator(*args, **kwargs))
            for result, fresh in zip(results, again, strict=True):
                # Views and in-place changes need no copy.
                if isinstance(result, torch.Tensor) and result.data_ptr() != fresh.data_ptr():
                    result.copy_(fresh)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS_ON_THE_HOST:
            raise CannotCapture(f"{func} is not permitted when the stream is capturing")
        results = func(*args, **kwargs)
        self._graph.operators.append((func, args, kwargs, tree_flatten(results)[0]))
        return results


class Recorder:
    """Captures on a CPU. `graphs`: in order of capture."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        return reversed(sizes)

    def __call__(self, work: Callable[[], None]) -> RecordedGraph:
        work()
        graph = RecordedGraph()
        with _Recording(graph):
            work()
        self.graphs.append(graph)
        return graph

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


class FunctionCapture(Recorder):
    """Captures with a function."""

    def __init__(self, make: Callable[[Callable[[], None]], RecordedGraph]) -> None:
        super().__init__()
        self._make = make

    def __call__(self, work: Callable[[], None]) -> RecordedGraph:
        return self._make(work)


class GraphableTorch(TorchAttention):
    """Torch's backend with decode steps over whole tables, whose operators depend on shapes alone."""

    def build_decode_metadata(self, rows: DecodeRows) -> "DecodeMetadata":
        block_size = self.pool.block_size
        last = ((rows.lengths - 1) // block_size)[:, None]
        begins = (rows.lengths - 1) % block_size == 0
        # Other steps of the torch backend rely on zeros after a length. The null block may be zeroed.
        begun = torch.where(begins, rows.tables.gather(1, last)[:, 0], 0)
        for pool in (*self.pool.keys, *self.pool.values):
            pool.index_fill_(0, begun, 0)
        return DecodeMetadata(self, rows)


class DecodeMetadata:
    def __init__(self, backend: GraphableTorch, rows: DecodeRows) -> None:
        self._pool = backend.pool
        self._rows = rows

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        rows, pool = self._rows, self._pool
        pool.store(call.layer, rows.slot_mapping, key, value)
        positions = torch.arange(rows.tables.shape[1] * pool.block_size)
        seen = positions < rows.lengths[:, None]
        if call.sliding_window is not None:
            seen = seen & (positions >= rows.lengths[:, None] - call.sliding_window)
        keys, values = (
            layers[call.layer][rows.tables].flatten(1, 2).masked_fill(~seen[..., None, None], 0.0)
            for layers in (pool.keys, pool.values)
        )
        return _attend_decode_rows(call, query, keys, values, seen)


def graphable(model: PreTrainedModel, config: EngineConfig) -> GraphableTorch:
    """A backend that `model` uses from now on. The pool starts full of NaN."""
    install()
    model.set_attn_implementation(ATTENTION_NAME)
    layers, num_blocks = record_layers(model), config.num_kv_blocks + 1
    backend = GraphableTorch(cpu_shape(layers, num_blocks, config.block_size, model.dtype))
    for pool in (*backend.pool.keys, *backend.pool.values):
        pool[1:] = torch.nan
    return backend


def graphed_runner(model: PreTrainedModel, config: EngineConfig, capture: Capture) -> ModelRunner:
    """A runner that replays decode steps, if `capture` and the self-check succeed."""
    backend = graphable(model, config)
    graphs = make_decode_graphs(model, backend, config, capture, lambda _: None)
    inputs = InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)
    return ModelRunner(model, backend, inputs, graphs)
