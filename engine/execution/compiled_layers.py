"""Compiles the decoder layers of a model by torch.compile, all while the model loads.

Law: a model's answers stay what they were but for rounding, which is tried, and nothing is compiled for a
request: a forward that no graph was made for runs as it did before. What cannot be compiled, or gives other
logits, is served uncompiled, and a warning says why. Layers that are alike share one graph for one row and
one for any other number of rows, so the time it takes does not grow with the depth of the model.

This file does not know what the operators are that a graph calls.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention import AttentionBackend, AttentionStep, LayerCall
from engine.execution.decode_trial import LARGEST_DIFFERENCE, OTHER_DIFFERENCE, OtherLogits, trial_inputs
from engine.execution.fast_rotary import take_back_rotary
from engine.execution.graph_operators import GraphStep, give_number
from engine.execution.inputs import StepInputs
from engine.execution.model_pass import run_model
from engine.execution.packed_linears import PackedLinear
from engine.execution.quiet import quiet_transformers
from engine.execution.transfers import move_inputs

log = logging.getLogger(__name__)

TRIED_ROWS = (1, 7, 64)
"""Of which the logits are compared. One row has a graph of its own, the others share one."""
LONGEST_REASON = 300
"""Characters: a tracer's error goes on for pages."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
CACHE_FOLDER = "compiled"

Backend = str | Callable[..., Any]
"""What torch.compile takes as its backend."""


class CompiledForward:
    """Takes the place of a model's forward: its layers attend through an operator that a graph may call."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._plain = model.forward
        self._graph_step = GraphStep()
        self._step: AttentionStep | None = None
        self._has_told = False
        self.stance = "default"

    def __call__(self, *args: Any, attention_step: AttentionStep, **kwargs: Any) -> Any:
        self._step = attention_step
        try:
            with torch.compiler.set_stance(self.stance):
                return self._plain(*args, attention_step=self._graph_step, **kwargs)
        finally:
            self._step = None
            self._tell_if_uncompiled()

    def _tell_if_uncompiled(self) -> None:
        """Once: what every step would say is not read."""
        if self._graph_step.num_uncompiled and not self._has_told:
            self._has_told = True
            log.warning("layers run uncompiled, as no graph fits a step; TORCH_LOGS=guards tells why")

    def attend_as(self, layer: int) -> Callable[..., torch.Tensor]:
        """What attends for that layer, in the forward that runs at the time."""

        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            sinks: torch.Tensor | None,
            scaling: float,
            window: int | None,
            softcap: float | None,
        ) -> torch.Tensor:
            assert self._step is not None
            return self._step.attend(LayerCall(layer, scaling, window, softcap, sinks), query, key, value)

        return attend


def compile_layers(
    model: PreTrainedModel,
    backend: AttentionBackend,
    config: EngineConfig,
    progress: Callable[[str], None],
    *,
    cache_dir: Path | None,
    compiler: Backend = "inductor",
) -> bool:
    """Compile the layers of `model` for every number of rows; whether that was done.

    The pool must be empty: the trial uses some of its blocks, and leaves them zeroed. `cache_dir`: what was
    compiled is kept there for the next start; None: where torch keeps it.
    """
    progress("compiling the model's layers, which takes from seconds to a few minutes")
    layers = _layers(model)
    # A compiler fuses torch's steps by itself, and looks a function up where its module has it.
    rotating = take_back_rotary(model)
    try:
        with torch.inference_mode(), quiet_transformers(), _cache_under(cache_dir):
            _compile_and_try(model, layers, backend, config, compiler)
    except Exception as error:  # noqa: BLE001 - tracers, compilers and models raise what they like
        _restore(model, layers)
        for module, forward in rotating:
            module.forward = forward
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        log.warning("the model runs uncompiled: %s: %s", type(error).__name__, reason)
        return False
    progress(f"compiled {len(layers)} layers")
    return True


def _compile_and_try(
    model: PreTrainedModel,
    layers: list[nn.Module],
    backend: AttentionBackend,
    config: EngineConfig,
    compiler: Backend,
) -> None:
    if not layers:
        raise ValueError("no list of as many modules as the model has layers was found in it")
    inputs = [_trial(model, config, rows) for rows in TRIED_ROWS]
    right = [_logits(model, backend, one) for one in inputs]
    forward = _put_compiled(model, layers, compiler)
    for one, expected in zip(inputs, right, strict=True):
        _compare(_logits(model, backend, one), expected, model.dtype)
    # Whether any other number of rows would be compiled anew.
    forward.stance = "fail_on_recompile"
    most = _trial(model, config, config.max_num_batched_tokens)
    for one in (*inputs, replace(most, logits_rows=most.logits_rows[:1])):
        _logits(model, backend, one)
    forward.stance = "eager_on_recompile"


def _put_compiled(model: PreTrainedModel, layers: list[nn.Module], compiler: Backend) -> CompiledForward:
    forward = CompiledForward(model)
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            give_number(module, forward.attend_as(layer))
        if isinstance(module, PackedLinear):
            give_number(module, module.multiply)
    # One process, not a pool of them that would live on beside the worker.
    options: dict[str, Any] | None = {"compile_threads": 1} if compiler == "inductor" else None
    for one in layers:
        compiled = torch.compile(one.forward, backend=compiler, dynamic=True, fullgraph=True, options=options)
        one.forward = compiled
    model.forward = forward
    return forward


def _restore(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    for module in (model, *layers):
        # What stands in the instance alone; the class has its own.
        vars(module).pop("forward", None)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the first list that has one for each layer; none without such a list."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((list(one) for one in lists if len(one) == num_layers), [])


def _trial(model: PreTrainedModel, config: EngineConfig, rows: int) -> StepInputs:
    most = min(rows, config.max_num_batched_tokens)
    return trial_inputs(model.config.get_text_config().vocab_size, config, most)


def _logits(model: PreTrainedModel, backend: AttentionBackend, inputs: StepInputs) -> torch.Tensor:
    blocks = (0, *map(int, inputs.batch.single_tables.flatten()))
    backend.zero_blocks(blocks)
    moved = move_inputs(inputs, model.device)
    step = backend.begin(moved.batch)
    logits = run_model(model, moved.token_ids, moved.positions, moved.logits_rows, step).float()
    backend.zero_blocks(blocks)
    return logits


def _compare(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    difference = float((found - right).abs().max() / right.abs().max())
    # NaN is not within the bound either.
    if not difference <= LARGEST_DIFFERENCE.get(dtype, OTHER_DIFFERENCE):
        raise OtherLogits(
            f"compiled layers differ for {len(right)} rows by {difference:.2g} of the largest logit"
        )


@contextmanager
def _cache_under(directory: Path | None) -> Iterator[None]:
    """Compilers keep their results below `directory`, unless the user has said where."""
    if directory is None or CACHE_VARIABLE in os.environ:
        yield
        return
    os.environ[CACHE_VARIABLE] = str((directory / CACHE_FOLDER).absolute())
    try:
        yield
    finally:
        del os.environ[CACHE_VARIABLE]
