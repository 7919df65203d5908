"""Runs the model on a scheduler's decision and returns the logits of the requested rows.

After an exception, `execute` may be called again with parts of the same decision.
"""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.execution.attention.interface import AttentionBackend, AttentionMetadata
from engine.execution.machine.device_errors import device_errors
from engine.execution.machine.memory import release_cached_memory
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.runner.synthetic_steps import null_inputs, warm_up_inputs
from engine.execution.runner.transfers import move_inputs
from engine.outputs import SchedulerOutputs


class Graphs(Protocol):
    """Captured forward passes of a model. `sizes`: their numbers of rows, ascending."""

    sizes: tuple[int, ...]

    def supports(self, inputs: StepInputs) -> bool:
        """Whether a graph can compute this step."""
        ...

    def replay(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [rows, vocabulary] of a step for which `supports` is true."""
        ...


class ModelRunner:
    """A model whose attention calls `paged_attention`, and the backend that holds its KV pool.

    `graphs`: of the same model and backend; steps that they support are replayed.
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
        """Numbers of rows of the captured graphs, ascending."""
        return self._graphs.sizes if self._graphs else ()

    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the scheduled tokens; returns logits [wanted rows, vocabulary] in the model's dtype.

        Rows are in the order of `outputs.scheduled`. `drawn`: tokens of the previous step that the host does
        not know yet, on the device. Raises `DeviceLost`; any other exception, such as `MemoryError`, passes.
        """
        with device_errors(), torch.inference_mode():
            if outputs.blocks_to_zero:
                self._backend.zero_blocks(outputs.blocks_to_zero)
            return self.forward(self._inputs.build(outputs, drawn))

    def check(self) -> None:
        """Run a forward pass of one token in the null block; raises what the device raises."""
        with device_errors(), torch.inference_mode():
            self.forward(null_inputs())
            self._backend.zero_blocks((0,))

    def warm_up(self, max_model_len: int, block_size: int) -> None:
        """Run every kind of step once in the null block, so that later steps compile no kernel."""
        with device_errors(), torch.inference_mode():
            for inputs in warm_up_inputs(max_model_len, block_size):
                self.forward(inputs)
            self._backend.zero_blocks((0,))

    def release_memory(self) -> bool:
        """Return memory that torch caches to the device; whether there was any. Raises `DeviceLost`."""
        with device_errors():
            return release_cached_memory(self._model.device)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """One forward pass; returns logits [wanted rows, vocabulary] in the model's dtype."""
        if self._graphs is not None and self._graphs.supports(inputs):
            return self._graphs.replay(inputs)
        moved = move_inputs(inputs, self._model.device)
        step = self._backend.build_metadata(moved.batch)
        token_ids = moved.known(moved.token_ids)
        return run_model(self._model, token_ids, moved.positions, moved.logits_rows, step)


def run_model(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_rows: torch.Tensor,
    step: AttentionMetadata,
) -> torch.Tensor:
    """Logits [wanted rows, vocabulary] of `token_ids` and `positions` [tokens], all on the model's device.

    Reads nothing back to the host, so the pass can be captured in a graph.
    """
    logits: torch.Tensor = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_rows,
        attention_metadata=step,
    ).logits[0]
    if len(logits) == len(token_ids) != len(logits_rows):
        # A model without `logits_to_keep` computes all logits.
        logits = logits[logits_rows]
    return logits
