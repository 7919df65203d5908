"""How a model's rows are computed: as fast as it goes, or so that nothing beside a row changes its bits.

Law: the two kernels differ in what stands here and in nothing else. This file does not know how either works.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import Backend, GraphableBackend, PoolShape
from engine.execution.attention.kv_pool import KVPool
from engine.execution.deterministic.attention import DeterministicAttention
from engine.execution.deterministic.experts import use_whole_rows
from engine.execution.deterministic.runner import DeterministicRunner
from engine.execution.deterministic.self_check import agreeing_row_counts
from engine.execution.graphs.cpu_capture import CpuCapture
from engine.execution.graphs.cuda_capture import CudaCapture
from engine.execution.graphs.decode_graphs import Capture, make_decode_graphs
from engine.execution.layers.elementwise_operator import ElementwiseOperator
from engine.execution.layers.fused_linears import fuse_linears
from engine.execution.layers.linear_operator import checked_linear_operator
from engine.execution.layers.native_elements import checked_elementwise, use_native_elements
from engine.execution.layers.packed_linears import Rule, linear_kernels, pack_linears
from engine.execution.layers.quantized_linears import quantize_linears
from engine.execution.loading.agreement import Preparation
from engine.execution.loading.loader import LoadedModel
from engine.execution.machine.memory import free_bytes
from engine.execution.machine.native_library import NativeLibrary
from engine.execution.runner.async_runner import AsyncRunner
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner

PACKED_MEMORY_SHARE = 0.25
"""Of the free memory, what packed copies of weights may take."""


class ExecutionPlan(NamedTuple):
    """The parts that belong together. `make_runner` is told how to say in words what takes long.

    `backends`: the first of these that agrees with a model's own attention serves it. `finish` is done to a
    model after `prepare`, and not to the one that is tried: it may change the logits.
    """

    backends: tuple[Backend, ...]
    prepare: Preparation
    make_runner: Callable[[LoadedModel, EngineConfig, Callable[[str], None]], AsyncRunner]
    finish: Preparation = lambda _: None


def _fuse(elements: ElementwiseOperator | None, model: PreTrainedModel) -> None:
    if elements is not None:
        # First: it recognises modules as transformers made them.
        use_native_elements(model, elements)
    fuse_linears(model)


def _speed_up(elements: ElementwiseOperator | None, rule: Rule, model: PreTrainedModel) -> None:
    _fuse(elements, model)
    if model.device.type == "cpu":
        max_bytes = int(free_bytes(model.device) * PACKED_MEMORY_SHARE)
        pack_linears(model, rule, max_bytes=max_bytes)


def _quantize(quantization: str, progress: Callable[[str], None], model: PreTrainedModel) -> None:
    progress(f"quantizing the weights to {quantization}")
    num_weights, (before, after) = quantize_linears(model, quantization)
    progress(f"{num_weights} weights in {quantization}: {after / 1e6:.0f} MB instead of {before / 1e6:.0f}")


def _plain_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    progress: Callable[[str], None],
    *,
    make_capture: Callable[[torch.device], Capture] | None,
) -> AsyncRunner:
    backend = loaded.backend.make(_pool_shape(loaded, config))
    graphs = None
    if make_capture is not None:
        if isinstance(backend, GraphableBackend):
            capture = make_capture(loaded.device)
            graphs = make_decode_graphs(loaded.model, backend, config, capture, progress)
        else:
            progress(f"decode graphs: none, as {loaded.backend.name} attention cannot be captured")
    runner = ModelRunner(loaded.model, backend, _input_builder(config), graphs)
    if loaded.device.type == "cuda":
        runner.warm_up(config.max_model_len, config.block_size)
    return runner


def _capture_maker(library: NativeLibrary | None) -> Callable[[torch.device], Capture]:
    def make_capture(device: torch.device) -> Capture:
        return CudaCapture(device) if device.type == "cuda" else CpuCapture(library)

    return make_capture


def _deterministic_runner(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]
) -> AsyncRunner:
    progress("trying which sizes of a forward give the same bits")
    row_counts = agreeing_row_counts(
        loaded.model,
        loaded.layers,
        DeterministicAttention,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    progress(f"deterministic: forwards of {', '.join(map(str, row_counts))} rows give the same bits")
    backend = DeterministicAttention(_pool_shape(loaded, config))
    return DeterministicRunner(loaded.model, backend, _input_builder(config), row_counts)


def _pool_shape(loaded: LoadedModel, config: EngineConfig) -> PoolShape:
    """With the null block, which `num_kv_blocks` does not count."""
    return PoolShape(loaded.layers, config.num_kv_blocks + 1, config.block_size, loaded.dtype, loaded.device)


def _input_builder(config: EngineConfig) -> InputBuilder:
    return InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)


def plain(
    backends: tuple[Backend, ...],
    library: NativeLibrary | None,
    *,
    has_graphs: bool = True,
) -> ExecutionPlan:
    """`library`: the native operators, or None without them. `has_graphs`: decode steps are captured where
    device and backend allow it.
    """
    # The self-checks run here, once for all models that are prepared.
    rule = partial(linear_kernels, checked_linear_operator(library))
    prepare = partial(_speed_up, checked_elementwise(library), rule)
    make_capture = _capture_maker(library) if has_graphs else None
    make_runner = partial(_plain_runner, make_capture=make_capture)
    return ExecutionPlan(backends, prepare, make_runner)


def quantized(
    backends: tuple[Backend, ...],
    library: NativeLibrary | None,
    quantization: str,
    progress: Callable[[str], None],
) -> ExecutionPlan:
    """As `plain`, with weights in "int8" or "int4"; no second copy of any is made beside them."""
    return ExecutionPlan(
        backends,
        partial(_fuse, checked_elementwise(library)),
        partial(_plain_runner, make_capture=None),
        partial(_quantize, quantization, progress),
    )


DETERMINISTIC = ExecutionPlan(
    (Backend("deterministic", DeterministicAttention, KVPool.bytes_per_block),),
    use_whole_rows,
    _deterministic_runner,
)
