"""Runs the model over what the scheduler decided, and hands back the logits that are wanted.

Law: `execute` is the decision and nothing else; after an exception it may be called again with parts of the
same decision. This file does not know why something was scheduled, or what is done with the logits.
"""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.execution.attention.interface import AttentionBackend
from engine.execution.machine.device_errors import device_errors
from engine.execution.machine.memory import release_cached_memory
from engine.execution.runner.forward import run_model
from engine.execution.runner.inputs import InputBuilder, StepInputs, null_inputs
from engine.execution.runner.transfers import move_inputs
from engine.execution.runner.warm_up import warm_up_inputs
from engine.outputs import SchedulerOutputs


class Graphs(Protocol):
    """Captured forward passes of a model."""

    sizes: tuple[int, ...]
    """Numbers of rows, ascending."""

    def supports(self, inputs: StepInputs) -> bool:
        """Whether one of them computes this step."""
        ...

    def replay(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [rows, vocabulary] of a step that `takes` accepted."""
        ...


class ModelRunner:
    """A model whose attention goes through `paged_attention`, and the backend that holds its KV pool.

    `graphs`: of the same model and backend; steps that they take are replayed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        inputs: InputBuilder,
        graphs: Graphs | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._inputs = inputs
        self._graphs = graphs

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that graphs were captured for, ascending."""
        return self._graphs.sizes if self._graphs else ()

    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the scheduled tokens; returns logits [wanted rows, vocabulary] in the model's dtype.

        The wanted rows of each item stand together, in the order of `outputs.scheduled`. `drawn`: what the
        step before drew, on the device, for tokens that the host does not know yet. Raises `DeviceLost`
        when the device is gone; any other exception, out of memory too, as it comes.
        """
        with device_errors(), torch.inference_mode():
            if outputs.blocks_to_zero:
                self._backend.zero_blocks(outputs.blocks_to_zero)
            return self.forward(self._inputs.build(outputs, drawn))

    def check(self) -> None:
        """Run a forward pass of one token that belongs to nobody; raises what the device raises."""
        with device_errors(), torch.inference_mode():
            self.forward(null_inputs())
            self._backend.zero_blocks((0,))

    def warm_up(self, max_model_len: int, block_size: int) -> None:
        """Run every kind of step once, so that later steps compile no kernel.

        Only the null block is used, and it is zeroed afterwards. Raises as `execute`.
        """
        with device_errors(), torch.inference_mode():
            for inputs in warm_up_inputs(max_model_len, block_size):
                self.forward(inputs)
            self._backend.zero_blocks((0,))

    def release_memory(self) -> bool:
        """Return what the CUDA allocator caches and no tensor uses to the device; whether there was any.

        A CPU's memory is not cached. Raises `DeviceLost`.
        """
        with device_errors():
            return release_cached_memory(self._model.device)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """One forward pass as it stands; returns logits [wanted rows, vocabulary] in the model's dtype."""
        if self._graphs is not None and self._graphs.supports(inputs):
            return self._graphs.replay(inputs)
        moved = move_inputs(inputs, self._model.device)
        step = self._backend.build_metadata(moved.batch)
        token_ids = moved.known(moved.token_ids)
        return run_model(self._model, token_ids, moved.positions, moved.logits_rows, step)
