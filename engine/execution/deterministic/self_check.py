"""Finds the row counts of forward passes that give the same bits on this machine.

The model itself, in its dtype and with its threads, computes the same rows at other positions of a forward
pass, beside other rows and in other chunks, and all logits must be bit-identical. Several row counts are
wanted for speed only: few rows for decodes, many for prompts.

In bfloat16 most logits agree although the order of additions differs, so each reduction of the model is also
checked by itself, on operands that show the order: see `reductions.py`. Other thread counts, machines and
versions of torch may give other bits.
"""

from itertools import pairwise

import torch
from transformers import PreTrainedModel

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import BackendFactory, LayerSpec, PoolShape
from engine.execution.deterministic.reductions import ReductionRecorder, ReductionSelfCheck
from engine.execution.deterministic.runner import DeterministicRunner
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.synthetic_steps import Part, SyntheticSequences

BASE_SIZE = 16
"""The row count that all others must agree with."""
OTHER_SIZES = (1, 2, 4, 8, 32, 64, 128)
NUM_ROWS = 160
"""Tokens of all chunked sequences together: more than the largest size."""
MAX_LENGTH = 80
"""Tokens of one sequence: more than a tile of keys."""
BLOCK_SIZE = 16
MAX_ROWS, MAX_FORWARDS = 96, 6
"""A size is checked on about this many rows and forward passes."""


def agreeing_row_counts(
    model: PreTrainedModel,
    specs: tuple[LayerSpec, ...],
    make_backend: BackendFactory,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> tuple[int, ...]:
    """The row counts, ascending, between which this model's logits are bit-identical.

    Raises `UnsupportedModel` if the rows of a single size already depend on their positions.
    """
    check = _SelfCheck(model, specs, make_backend, min(MAX_LENGTH, max_model_len))
    if not check.agrees(BASE_SIZE):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} cannot be served with deterministic on: its logits in"
            f" {str(model.dtype).removeprefix('torch.')} on {model.device.type} with"
            f" {torch.get_num_threads()} threads depend on the rest of the batch"
        )
    useful = [size for size in OTHER_SIZES if size < 2 * max_num_batched_tokens]
    return tuple(sorted([BASE_SIZE, *filter(check.agrees, useful)]))


class _SelfCheck:
    """Sequences of `length` tokens in a pool of their own, computed once in forward passes of `BASE_SIZE`."""

    def __init__(
        self, model: PreTrainedModel, specs: tuple[LayerSpec, ...], make_backend: BackendFactory, length: int
    ) -> None:
        self._model = model
        self._length = length
        self._num_sequences = 1 + -(-NUM_ROWS // length)
        vocab_size = model.config.get_text_config().vocab_size
        self._sequences = SyntheticSequences([length] * self._num_sequences, BLOCK_SIZE, vocab_size)
        shape = PoolShape(specs, self._sequences.num_blocks, BLOCK_SIZE, model.dtype, model.device)
        self._backend = make_backend(shape)
        with ReductionRecorder(BASE_SIZE) as recorder:
            self._expected = self._compute_all()
        self._reductions = [ReductionSelfCheck(one, BASE_SIZE) for one in recorder.reductions]

    def agrees(self, size: int) -> bool:
        """Whether forward passes of `size` rows give the bits of those of `BASE_SIZE`."""
        return self._reductions_agree(size) and self._logits_agree(size)

    def _reductions_agree(self, size: int) -> bool:
        return all(
            reduction.agrees(number)
            for reduction in self._reductions
            for number in reduction.sizes or (size,)
        )

    def _logits_agree(self, size: int) -> bool:
        for parts in self._forwards(size):
            expected = torch.cat([self._expected[index][start:end] for index, start, end in parts])
            if not torch.equal(self._run(size, parts), expected):
                # Restores the keys and values in the pool for the next size.
                self._compute_all()
                return False
        return True

    def _compute_all(self) -> list[torch.Tensor]:
        """The logits of each sequence, [length, vocabulary]."""
        borders = [*range(0, self._length, BASE_SIZE), self._length]
        return [
            torch.cat([self._run(BASE_SIZE, [(index, *chunk)]) for chunk in pairwise(borders)])
            for index in range(self._num_sequences)
        ]

    def _forwards(self, size: int) -> list[list[Part]]:
        """Forward passes of `size` rows: sequence 0 decodes, the ends of the others are cut inside tiles.

        Each part runs to the end of its sequence, since the rest of a block that is begun again is zeroed.
        """
        last = self._length - 1
        others = range(1, self._num_sequences)
        num_chunked = max(1, size - 1)
        num_rows = max(num_chunked, min(MAX_ROWS, MAX_FORWARDS * num_chunked))
        tail = min(self._length - min(6, last), -(-num_rows // len(others)))
        rows = [(index, at) for index in reversed(others) for at in range(self._length - tail, self._length)]
        # A mostly empty forward pass would show little for its cost.
        rows = rows[len(rows) % num_chunked if len(rows) > num_chunked else 0 :]
        decode: list[Part] = [(0, last, last + 1)] if size > 1 else []
        full = [decode + _parts(rows[at : at + num_chunked]) for at in range(0, len(rows), num_chunked)]
        if size != BASE_SIZE:
            return full
        # Single rows, for which an expert gets one row instead of many.
        return full + [[(index, last, last + 1)] for index in range(min(3, self._num_sequences))]

    def _run(self, size: int, parts: list[Part]) -> torch.Tensor:
        """The logits of all rows of one forward pass."""
        inputs = InputBuilder(self._num_sequences, self._length, BLOCK_SIZE)
        runner = DeterministicRunner(self._model, self._backend, inputs, (size,))
        return runner.execute(self._sequences.step(parts))


def _parts(rows: list[tuple[int, int]]) -> list[Part]:
    """Rows (sequence, position) in order, as ranges of positions."""
    parts: list[Part] = []
    for index, at in rows:
        if parts and parts[-1][0] == index:
            parts[-1] = (index, parts[-1][1], at + 1)
        else:
            parts.append((index, at, at + 1))
    return parts
