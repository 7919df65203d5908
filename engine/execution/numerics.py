"""How a model's rows are computed: as fast as it goes, or so that nothing beside a row changes its bits.

Law: the two ways differ in what stands here and in nothing else. This file does not know how either works.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.deterministic_attention import DeterministicAttention
from engine.execution.deterministic_experts import use_whole_rows
from engine.execution.deterministic_runner import DeterministicRunner
from engine.execution.deterministic_trial import agreeing_row_counts
from engine.execution.fast_elements import speed_up_elements
from engine.execution.fused_linears import fuse_linears
from engine.execution.inputs import InputBuilder
from engine.execution.kv_cache import free_bytes
from engine.execution.kv_pool import KVPool
from engine.execution.loader import LoadedModel
from engine.execution.model_runner import ModelRunner
from engine.execution.native_library import NativeLibrary
from engine.execution.packed_linears import pack_linears
from engine.execution.trial import Backend, Preparation
from engine.step_execution import Runner

PACKED_MEMORY_SHARE = 0.25
"""Of the free memory, what packed copies of weights may take."""


class Numerics(NamedTuple):
    """The parts that belong together. `make_runner` is told how to say in words what takes long.

    `backends`: the first of these that agrees with a model's own attention serves it.
    """

    backends: tuple[Backend, ...]
    prepare: Preparation
    make_runner: Callable[[LoadedModel, EngineConfig, Callable[[str], None]], Runner]


def _speed_up(library: NativeLibrary | None, model: PreTrainedModel) -> None:
    if library is not None:
        # First: it recognises modules as transformers made them.
        speed_up_elements(model, library)
    fuse_linears(model)
    if model.device.type == "cpu":
        pack_linears(model, max_bytes=int(free_bytes(model.device) * PACKED_MEMORY_SHARE))


def _plain_runner(loaded: LoadedModel, config: EngineConfig, _: Callable[[str], None]) -> Runner:
    backend = loaded.backend.make(
        loaded.layers, config.num_kv_blocks + 1, config.block_size, loaded.dtype, loaded.device
    )
    return ModelRunner(loaded.model, backend, _input_builder(config))


def _deterministic_runner(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]
) -> Runner:
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


def plain(backends: tuple[Backend, ...], library: NativeLibrary | None) -> Numerics:
    """As fast as it goes. `library`: the native operators; None where there are none."""
    return Numerics(backends, partial(_speed_up, library), _plain_runner)


DETERMINISTIC = Numerics(
    (Backend("deterministic", DeterministicAttention, KVPool.bytes_per_block),),
    use_whole_rows,
    _deterministic_runner,
)
