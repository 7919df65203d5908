"""Compares each captured graph with a forward pass, on other rows than those of the capture.

This detects graphs that contain values of their capture or read padding rows.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import AttentionBackend
from engine.execution.runner.inputs import StepInputs
from engine.execution.runner.model_runner import run_model
from engine.execution.runner.synthetic_steps import SyntheticSequences
from engine.execution.runner.transfers import move_inputs

TOLERANCES = {torch.float32: 1e-3}
OTHER_TOLERANCE = 5e-2
"""Of logits, relative to the largest: the kernels are the same, but long sums may be split differently."""


class OtherLogits(Exception):
    """A graph returns other logits than the forward pass."""


class GraphSelfCheck:
    """A decode step and its logits from a forward pass.

    One pass serves all graphs, as the rows of a smaller graph are the first rows of the same step.
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend, config: EngineConfig, max_rows: int
    ) -> None:
        """`max_rows`: rows of the largest graph."""
        self._model = model
        self._backend = backend
        self._config = config
        self._max_rows = _num_rows(max_rows)
        whole = self._inputs(self._max_rows)
        self._zero_blocks(whole)
        self.logits = self._forward(whole)
        """Logits of the forward pass, [rows, vocabulary], in the model's dtype."""

    def check(self, replay: Callable[[StepInputs], torch.Tensor], size: int) -> None:
        """Raise `OtherLogits` unless `replay` and the forward pass agree on a step of the graph of `size`
        rows.

        The step has one row less than the graph, if that has several. Its blocks are zeroed between runs, so
        that a graph cannot read what the forward pass wrote.
        """
        inputs = self._inputs(_num_rows(size))
        found = self._run_and_zero(inputs, replay)
        difference = _difference(found, self.logits[: len(found)])
        if not self._is_small(difference):
            # Kernels for more rows may split sums differently, and rounding may select another expert.
            difference = _difference(found, self._forward(inputs))
        if not self._is_small(difference):
            raise OtherLogits(
                f"a graph of {size} rows differs from the forward pass by {difference:.2g} of the largest"
                " logit"
            )

    def _inputs(self, num_rows: int) -> StepInputs:
        vocab_size = self._model.config.get_text_config().vocab_size
        return check_inputs(vocab_size, self._config, self._max_rows, first=num_rows)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        return self._run_and_zero(inputs, self._run)

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        moved = move_inputs(inputs, self._model.device)
        metadata = self._backend.build_metadata(moved.batch)
        return run_model(self._model, moved.token_ids, moved.positions, moved.logits_rows, metadata)

    def _run_and_zero(self, inputs: StepInputs, work: Callable[[StepInputs], torch.Tensor]) -> torch.Tensor:
        found = work(inputs)
        self._zero_blocks(inputs)
        return found

    def _zero_blocks(self, inputs: StepInputs) -> None:
        self._backend.zero_blocks((0, *map(int, inputs.batch.decode_tables.flatten())))

    def _is_small(self, difference: float) -> bool:
        # False for NaN.
        return difference <= TOLERANCES.get(self._model.dtype, OTHER_TOLERANCE)


def _num_rows(size: int) -> int:
    """Rows of the step that checks a graph of `size` rows."""
    return max(1, size - 1)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    expected = expected.float()
    return float((found.float() - expected).abs().max() / expected.abs().max())


def check_inputs(
    vocab_size: int, config: EngineConfig, max_rows: int, *, first: int | None = None
) -> StepInputs:
    """A decode step of different tokens at different lengths, each sequence with its own blocks.

    `max_rows` rows, or as many as the pool holds; with `first` only the first of these.
    """
    count, block_size = min(max_rows, config.num_kv_blocks), config.block_size
    num_blocks = max(1, min(2, config.num_kv_blocks // count, config.max_model_len // block_size))
    lengths = [(num_blocks - 1) * block_size + 1 + row % block_size for row in range(count)]
    lengths = [min(length, config.max_model_len) for length in lengths]
    sequences = SyntheticSequences(lengths, block_size, vocab_size)
    inputs = sequences.inputs([(row, length - 1, length) for row, length in enumerate(lengths)][:first])
    # A graph zeroes no blocks.
    return replace(inputs, batch=replace(inputs.batch, blocks_begun=inputs.token_ids[:0]))
