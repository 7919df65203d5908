"""Finds the sizes of a forward that give the same bits on this machine, or says that there are none.

Law: nothing is taken for granted about kernels. The model itself, in its dtype and with the threads it has,
computes the same rows at other places of a forward, with other mates and across other borders of chunks, and
every logit must agree to the bit. Sizes are wanted for speed alone: a few rows for decodes, many for prompts.

A kernel's order of additions follows from the sizes of its operands and not from the numbers in them. In
bfloat16 most logits agree although the order differs, so each reduction that the model calls is also tried by
itself, on operands that show the order: see `deterministic_operators.py`. Other thread counts, other machines
and other versions of torch cannot be tried here; they may give other bits.
"""

import torch
from transformers import PreTrainedModel

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import BackendFactory, LayerSpec, PoolShape
from engine.execution.deterministic.operators import ReductionRecorder, ReductionSelfCheck
from engine.execution.deterministic.runner import DeterministicRunner
from engine.execution.runner.inputs import InputBuilder
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

FIRST_SIZE = 16
"""The size that all others must agree with."""
OTHER_SIZES = (1, 2, 4, 8, 32, 64, 128)
NUM_ROWS = 160
"""Of the sequences that are read in chunks, together: more than the largest size."""
LONGEST = 80
"""Of one sequence: more than a tile of keys."""
BLOCK_SIZE = 16
MOST_ROWS, MOST_FORWARDS = 96, 6
"""A size is tried on about so many rows, in so many forwards; at least in one."""

Part = tuple[int, int, int]
"""A sequence's number; the first of its tokens that are computed, and the one after the last."""


def agreeing_row_counts(
    model: PreTrainedModel,
    specs: tuple[LayerSpec, ...],
    make_backend: BackendFactory,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> tuple[int, ...]:
    """The row counts, ascending, between which this model's logits do not differ by a bit.

    Raises `UnsupportedModel`, with the model's type, if already the rows of one size depend on their places.
    """
    trial = _Trial(model, specs, make_backend, min(LONGEST, max_model_len))
    if not trial.agrees(FIRST_SIZE):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} cannot be served with deterministic on: its logits in"
            f" {str(model.dtype).removeprefix('torch.')} on {model.device.type} with"
            f" {torch.get_num_threads()} threads depend on what is computed beside them"
        )
    useful = [size for size in OTHER_SIZES if size < 2 * max_num_batched_tokens]
    return tuple(sorted([FIRST_SIZE, *filter(trial.agrees, useful)]))


class _Trial:
    """Sequences of `length` tokens in a pool of their own, computed once in forwards of `FIRST_SIZE`."""

    def __init__(
        self, model: PreTrainedModel, specs: tuple[LayerSpec, ...], make_backend: BackendFactory, length: int
    ) -> None:
        num_sequences = 1 + -(-NUM_ROWS // length)
        blocks_each = -(-length // BLOCK_SIZE)
        num_blocks = 1 + num_sequences * blocks_each
        self._model = model
        self._length = length
        self._backend = make_backend(PoolShape(specs, num_blocks, BLOCK_SIZE, model.dtype, model.device))
        self._sequences = [
            _sequence(slot, length, model.config.get_text_config().vocab_size, num_sequences, num_blocks)
            for slot in range(num_sequences)
        ]
        with ReductionRecorder(FIRST_SIZE) as recorder:
            self._expected = self._compute_all()
        self._reductions = [ReductionSelfCheck(one, FIRST_SIZE) for one in recorder.reductions]

    def agrees(self, size: int) -> bool:
        """Whether forwards of `size` rows give what those of `FIRST_SIZE` gave."""
        return self._reductions_agree(size) and self._logits_agree(size)

    def _reductions_agree(self, size: int) -> bool:
        return all(
            reduction.agrees(number)
            for reduction in self._reductions
            for number in reduction.sizes or (size,)
        )

    def _logits_agree(self, size: int) -> bool:
        for parts in self._forwards(size):
            expected = torch.cat([self._expected[who][start:end] for who, start, end in parts])
            if not torch.equal(self._run(size, parts), expected):
                # The pool now holds keys and values that the next size would not agree with.
                self._compute_all()
                return False
        return True

    def _compute_all(self) -> list[torch.Tensor]:
        """The logits of each sequence, [length, vocabulary]."""
        starts = range(0, self._length, FIRST_SIZE)
        return [
            torch.cat(
                [
                    self._run(FIRST_SIZE, [(who, start, min(start + FIRST_SIZE, self._length))])
                    for start in starts
                ]
            )
            for who in range(len(self._sequences))
        ]

    def _forwards(self, size: int) -> list[list[Part]]:
        """Some forwards of `size` rows: sequence 0 decodes, the others' ends are cut where no tile ends.

        Each runs to its sequence's end, since what follows in a block that is begun again is zeroed.
        """
        last = self._length - 1
        others = range(1, len(self._sequences))
        num_mates = max(1, size - 1)
        num_rows = max(num_mates, min(MOST_ROWS, MOST_FORWARDS * num_mates))
        tail = min(self._length - min(6, last), -(-num_rows // len(others)))
        rows = [(who, at) for who in reversed(others) for at in range(self._length - tail, self._length)]
        # A forward that is hardly filled would show little for what it costs.
        rows = rows[len(rows) % num_mates if len(rows) > num_mates else 0 :]
        decode: list[Part] = [(0, last, last + 1)] if size > 1 else []
        crowded = [decode + _parts(rows[at : at + num_mates]) for at in range(0, len(rows), num_mates)]
        return [*crowded, *self._lone_rows()] if size == FIRST_SIZE else crowded

    def _lone_rows(self) -> list[list[Part]]:
        """Nobody beside them: experts that are handed just their rows then have one, where they had many."""
        last = self._length - 1
        return [[(who, last, last + 1)] for who in range(min(3, len(self._sequences)))]

    def _run(self, size: int, parts: list[Part]) -> torch.Tensor:
        """The logits of all rows of one forward."""
        inputs = InputBuilder(len(self._sequences), self._length, BLOCK_SIZE)
        runner = DeterministicRunner(self._model, self._backend, inputs, (size,))
        items = tuple(
            ScheduledSequence(self._sequences[who], start, end - start, 0, False) for who, start, end in parts
        )
        return runner.execute(SchedulerOutputs(prefill=items))


def _parts(rows: list[tuple[int, int]]) -> list[Part]:
    """Rows (sequence, position) in order, as ranges of positions."""
    parts: list[Part] = []
    for who, at in rows:
        if parts and parts[-1][0] == who:
            parts[-1] = (who, parts[-1][1], at + 1)
        else:
            parts.append((who, at, at + 1))
    return parts


def _sequence(slot: int, length: int, vocab_size: int, num_sequences: int, num_blocks: int) -> Sequence:
    """Tokens of its own; its blocks lie apart, as they do in a pool that has been in use."""
    token_ids = [1 + (slot * length + at) * 37 % (vocab_size - 1) for at in range(length)]
    sequence = Sequence(f"trial-{slot}", token_ids, SamplingParams(), arrival_time=0.0)
    sequence.admit(slot)
    sequence.block_table = list(range(1 + slot, num_blocks, num_sequences))
    return sequence
