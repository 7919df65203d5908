"""How a model's rows are computed: as fast as it goes, or so that nothing beside a row changes its bits.

Law: the two ways differ in what stands here and in nothing else. This file does not know how either works.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention import GraphableBackend
from engine.execution.compiled_layers import compile_layers
from engine.execution.cuda_capture import CudaCapture
from engine.execution.decode_graphs import make_decode_graphs
from engine.execution.deterministic_attention import DeterministicAttention
from engine.execution.deterministic_experts import use_whole_rows
from engine.execution.deterministic_runner import DeterministicRunner
from engine.execution.deterministic_trial import agreeing_row_counts
from engine.execution.fast_elements import speed_up_elements
from engine.execution.fused_linears import fuse_linears
from engine.execution.inputs import InputBuilder
from engine.execution.kv_cache import free_bytes
from engine.execution.kv_pool import KVPool
from engine.execution.launcher import AheadRunner
from engine.execution.linear_ways import linear_ways
from engine.execution.loader import LoadedModel
from engine.execution.model_runner import ModelRunner
from engine.execution.native_library import NativeLibrary
from engine.execution.packed_linears import pack_linears
from engine.execution.quantized_linears import quantize_linears
from engine.execution.trial import Backend, Preparation

PACKED_MEMORY_SHARE = 0.25
"""Of the free memory, what packed copies of weights may take."""


class Compilation(NamedTuple):
    """`cache_dir`: see `compile_layers`."""

    cache_dir: Path | None


class Numerics(NamedTuple):
    """The parts that belong together. `make_runner` is told how to say in words what takes long.

    `backends`: the first of these that agrees with a model's own attention serves it. `finish` is done to a
    model after `prepare`, and not to the one that is tried: it may change the logits.
    """

    backends: tuple[Backend, ...]
    prepare: Preparation
    make_runner: Callable[[LoadedModel, EngineConfig, Callable[[str], None]], AheadRunner]
    finish: Preparation = lambda _: None


def _fuse(library: NativeLibrary | None, model: PreTrainedModel) -> None:
    if library is not None:
        # First: it recognises modules as transformers made them.
        speed_up_elements(model, library)
    fuse_linears(model)


def _speed_up(library: NativeLibrary | None, model: PreTrainedModel) -> None:
    _fuse(library, model)
    if model.device.type == "cpu":
        max_bytes = int(free_bytes(model.device) * PACKED_MEMORY_SHARE)
        pack_linears(model, linear_ways(library), max_bytes=max_bytes)


def _quantize(quantization: str, progress: Callable[[str], None], model: PreTrainedModel) -> None:
    progress(f"quantizing the weights to {quantization}")
    num_weights, (before, after) = quantize_linears(model, quantization)
    progress(f"{num_weights} weights in {quantization}: {after / 1e6:.0f} MB instead of {before / 1e6:.0f}")


def _plain_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    progress: Callable[[str], None],
    *,
    has_graphs: bool,
    compilation: Compilation | None = None,
) -> AheadRunner:
    backend = loaded.backend.make(
        loaded.layers, config.num_kv_blocks + 1, config.block_size, loaded.dtype, loaded.device
    )
    if compilation is not None:
        # Before any graph is captured: it then holds what was compiled.
        compile_layers(loaded.model, backend, config, progress, cache_dir=compilation.cache_dir)
    graphs = None
    if has_graphs and loaded.device.type == "cuda":
        if isinstance(backend, GraphableBackend):
            capture = CudaCapture(loaded.device)
            graphs = make_decode_graphs(loaded.model, backend, config, capture, progress)
        else:
            progress(f"decode graphs: none, as {loaded.backend.name} attention cannot be captured")
    return ModelRunner(loaded.model, backend, _input_builder(config), graphs)


def _deterministic_runner(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]
) -> AheadRunner:
    progress("trying which sizes of a forward give the same bits")
    row_counts = agreeing_row_counts(
        loaded.model,
        loaded.layers,
        DeterministicAttention,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    progress(f"deterministic: forwards of {', '.join(map(str, row_counts))} rows give the same bits")
    backend = DeterministicAttention(
        loaded.layers, config.num_kv_blocks + 1, config.block_size, loaded.dtype, loaded.device
    )
    return DeterministicRunner(loaded.model, backend, _input_builder(config), row_counts)


def _input_builder(config: EngineConfig) -> InputBuilder:
    return InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)


def plain(
    backends: tuple[Backend, ...],
    library: NativeLibrary | None,
    *,
    has_graphs: bool = True,
    compilation: Compilation | None = None,
) -> Numerics:
    """`library`: the native operators, or None without them. `has_graphs`: decode steps are captured where
    device and backend allow it. `compilation`: the layers are compiled; None: they are not.
    """
    make_runner = partial(_plain_runner, has_graphs=has_graphs, compilation=compilation)
    return Numerics(backends, partial(_speed_up, library), make_runner)


def quantized(
    backends: tuple[Backend, ...],
    library: NativeLibrary | None,
    quantization: str,
    progress: Callable[[str], None],
) -> Numerics:
    """As `plain`, with weights in "int8" or "int4"; no second copy of any is made beside them."""
    return Numerics(
        backends,
        partial(_fuse, library),
        partial(_plain_runner, has_graphs=False),
        partial(_quantize, quantization, progress),
    )


DETERMINISTIC = Numerics(
    (Backend("deterministic", DeterministicAttention, KVPool.bytes_per_block),),
    use_whole_rows,
    _deterministic_runner,
)
