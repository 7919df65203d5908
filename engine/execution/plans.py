"""Execution plans: how a loaded model is prepared and run. Either as fast as possible, quantized, or
deterministic, where nothing beside a row changes its bits.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.execution.attention.interface import Backend, GraphableBackend, PoolShape
from engine.execution.attention.kv_pool import KVPool
from engine.execution.deterministic.attention import DeterministicAttention
from engine.execution.deterministic.experts import use_whole_rows
from engine.execution.deterministic.runner import DeterministicRunner
from engine.execution.deterministic.self_check import agreeing_row_counts
from engine.execution.graphs.cpu_capture import CpuCapture
from engine.execution.graphs.cuda_capture import CudaCapture
from engine.execution.graphs.decode_graphs import make_decode_graphs
from engine.execution.layers.elementwise_operator import ElementwiseOperator
from engine.execution.layers.fused_linears import fuse_linears
from engine.execution.layers.linear_operator import checked_linear_operator
from engine.execution.layers.native_elements import checked_elementwise, use_native_elements
from engine.execution.layers.packed_linears import pack_linears
from engine.execution.layers.quantized_linears import quantize_linears
from engine.execution.loading.agreement import Preparation
from engine.execution.loading.loader import LoadedModel
from engine.execution.machine.memory import free_bytes
from engine.execution.machine.native_library import NativeLibrary
from engine.execution.runner.async_runner import AsyncRunner
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner

PACKED_MEMORY_SHARE = 0.25
"""Share of the free memory that packed copies of weights may take."""
QUANTIZATION = ("none", "int8", "int4")

Progress = Callable[[str], None]
"""Receives log lines."""


class ExecutionPlan(NamedTuple):
    """How a model is prepared and run.

    `backends`, `prepare`, `finish`: see `load_model`. `make_runner`: builds the runner of a loaded model.
    """

    backends: tuple[Backend, ...]
    prepare: Preparation
    make_runner: Callable[[LoadedModel, EngineConfig, Progress], AsyncRunner]
    finish: Preparation = lambda _: None


def plain(
    backends: tuple[Backend, ...], library: NativeLibrary | None, *, has_graphs: bool = True
) -> ExecutionPlan:
    """As fast as possible. `library`: the native operators, if any. `has_graphs`: capture decode steps."""
    # The self-checks run here, once for all models that are prepared.
    elementwise = checked_elementwise(library)
    linears = checked_linear_operator(library)

    def prepare(model: PreTrainedModel) -> None:
        _fuse(elementwise, model)
        if linears is not None:
            max_bytes = int(free_bytes(model.device) * PACKED_MEMORY_SHARE)
            pack_linears(model, linears, max_bytes=max_bytes)

    make_runner = partial(_model_runner, library=library, has_graphs=has_graphs)
    return ExecutionPlan(backends, prepare, make_runner)


def quantized(
    backends: tuple[Backend, ...], library: NativeLibrary | None, quantization: str, progress: Progress
) -> ExecutionPlan:
    """Weights in "int8" or "int4", without packed copies and decode graphs."""

    def finish(model: PreTrainedModel) -> None:
        progress(f"quantizing the weights to {quantization}")
        num_weights, (before, after) = quantize_linears(model, quantization)
        sizes = f"{after / 1e6:.0f} MB instead of {before / 1e6:.0f}"
        progress(f"{num_weights} weights in {quantization}: {sizes}")

    return ExecutionPlan(backends, partial(_fuse, checked_elementwise(library)), _model_runner, finish)


def check_quantization(quantization: str, *, deterministic: bool, device: torch.device) -> None:
    """Raise `InvalidParameter` for an unknown or unavailable quantization."""
    if quantization not in QUANTIZATION:
        raise InvalidParameter("quantization", f"must be {', '.join(QUANTIZATION)}, not {quantization!r}")
    if quantization == "none":
        return
    if deterministic:
        raise InvalidParameter("quantization", "deterministic mode is for plain weights; use none")
    if device.type != "cpu":
        raise InvalidParameter("quantization", f"{quantization} is for a CPU, not {device.type}; use none")


def _fuse(elementwise: ElementwiseOperator | None, model: PreTrainedModel) -> None:
    if elementwise is not None:
        # First, since it recognises the modules of transformers.
        use_native_elements(model, elementwise)
    fuse_linears(model)


def _model_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    progress: Progress,
    *,
    library: NativeLibrary | None = None,
    has_graphs: bool = False,
) -> AsyncRunner:
    backend = loaded.backend.make(_pool_shape(loaded, config))
    graphs = None
    if has_graphs and isinstance(backend, GraphableBackend):
        capture = CudaCapture(loaded.device) if loaded.device.type == "cuda" else CpuCapture(library)
        graphs = make_decode_graphs(loaded.model, backend, config, capture, progress)
    elif has_graphs:
        progress(f"decode graphs: none, as {loaded.backend.name} attention cannot be captured")
    runner = ModelRunner(loaded.model, backend, _input_builder(config), graphs)
    if loaded.device.type == "cuda":
        runner.warm_up(config.max_model_len, config.block_size)
    return runner


def _deterministic_runner(loaded: LoadedModel, config: EngineConfig, progress: Progress) -> AsyncRunner:
    progress("checking which row counts of a forward pass give the same bits")
    row_counts = agreeing_row_counts(
        loaded.model,
        loaded.layers,
        DeterministicAttention,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    progress(f"deterministic: forward passes of {', '.join(map(str, row_counts))} rows give the same bits")
    backend = DeterministicAttention(_pool_shape(loaded, config))
    return DeterministicRunner(loaded.model, backend, _input_builder(config), row_counts)


def _pool_shape(loaded: LoadedModel, config: EngineConfig) -> PoolShape:
    """Adds the null block, which `num_kv_blocks` does not count."""
    return PoolShape(loaded.layers, config.num_kv_blocks + 1, config.block_size, loaded.dtype, loaded.device)


def _input_builder(config: EngineConfig) -> InputBuilder:
    return InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)


DETERMINISTIC = ExecutionPlan(
    (Backend("deterministic", DeterministicAttention, KVPool.bytes_per_block),),
    use_whole_rows,
    _deterministic_runner,
)
