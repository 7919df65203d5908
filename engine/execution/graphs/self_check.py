"""A trial of each captured graph against the forward pass, with other rows than those it was captured with.

Law: a graph that has kept a value of its capture, or that sees the rows which fill a step up, is found out
before it serves anybody. This file does not know how graphs are made.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import AttentionBackend, AttentionBatch
from engine.execution.runner.forward import run_model
from engine.execution.runner.inputs import StepInputs
from engine.execution.runner.transfers import move_inputs

LARGEST_DIFFERENCE = {torch.float32: 1e-3}
OTHER_DIFFERENCE = 5e-2
"""Of logits, as a share of the largest: the same kernels, but perhaps another split of a long sum."""
TOKEN_STRIDE = 37


class OtherLogits(Exception):
    """A graph does not give what the forward pass gives."""


class GraphSelfCheck:
    """A step of single tokens, and what the forward pass gives for it.

    One pass serves all graphs, as the fewer rows of a smaller graph are the first of the same step.
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend, config: EngineConfig, most: int
    ) -> None:
        """`most`: rows of the largest graph."""
        self._model = model
        self._backend = backend
        self._config = config
        self._most = _num_rows(most)
        whole = self._inputs(self._most)
        self._zero_blocks(whole)
        self.logits = self._forward(whole)
        """Of the forward pass, [rows, vocabulary], in the model's dtype."""

    def check(self, replay: Callable[[StepInputs], torch.Tensor], size: int) -> None:
        """Raise `OtherLogits` unless both ways agree on a step of up to `size` rows.

        The step has one row less than the graph, where it has several. Its blocks are zeroed before and
        after each way: what a graph does not write is not there.
        """
        inputs = self._inputs(_num_rows(size))
        found = self._leaving_no_trace(inputs, replay)
        difference = _difference(found, self.logits[: len(found)])
        if not self._is_small(difference):
            # In kernels for more rows, sums may be split so that an expert is chosen by another rounding.
            difference = _difference(found, self._forward(inputs))
        if not self._is_small(difference):
            raise OtherLogits(
                f"a graph of {size} rows differs from the forward pass by {difference:.2g} of the largest"
                " logit"
            )

    def _inputs(self, num_rows: int) -> StepInputs:
        vocab_size = self._model.config.get_text_config().vocab_size
        return trial_inputs(vocab_size, self._config, self._most, first=num_rows)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        return self._leaving_no_trace(inputs, self._run)

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        moved = move_inputs(inputs, self._model.device)
        step = self._backend.build_metadata(moved.batch)
        return run_model(self._model, moved.token_ids, moved.positions, moved.logits_rows, step)

    def _leaving_no_trace(
        self, inputs: StepInputs, work: Callable[[StepInputs], torch.Tensor]
    ) -> torch.Tensor:
        found = work(inputs)
        self._zero_blocks(inputs)
        return found

    def _zero_blocks(self, inputs: StepInputs) -> None:
        self._backend.zero_blocks((0, *map(int, inputs.batch.decode_tables.flatten())))

    def _is_small(self, difference: float) -> bool:
        # NaN is not within the bound either.
        return difference <= LARGEST_DIFFERENCE.get(self._model.dtype, OTHER_DIFFERENCE)


def _num_rows(size: int) -> int:
    """Of the step that a graph of `size` rows is tried with."""
    return max(1, size - 1)


def _difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """As a share of the largest."""
    right = right.float()
    return float((found.float() - right).abs().max() / right.abs().max())


def trial_inputs(vocab_size: int, config: EngineConfig, most: int, *, first: int | None = None) -> StepInputs:
    """Different tokens at different lengths, each with blocks of its own.

    As many rows as the pool has room for, `most` at most; with `first` only the first of these.
    """
    count = min(most, config.num_kv_blocks)
    num_blocks = max(1, min(2, config.num_kv_blocks // count, config.max_model_len // config.block_size))
    rows = torch.arange(count)[:first]
    tables = 1 + torch.arange(count * num_blocks).view(count, num_blocks)[:first]
    lengths = (num_blocks - 1) * config.block_size + 1 + rows % config.block_size
    positions = lengths.clamp(max=config.max_model_len) - 1
    own = tables[rows, positions // config.block_size]
    return StepInputs(
        token_ids=rows * TOKEN_STRIDE % vocab_size,
        positions=positions,
        logits_rows=rows,
        batch=AttentionBatch(
            slot_mapping=own * config.block_size + positions % config.block_size,
            blocks_begun=rows[:0],
            decode_rows=rows,
            decode_lengths=positions + 1,
            decode_tables=tables,
            chunks=(),
        ),
    )
