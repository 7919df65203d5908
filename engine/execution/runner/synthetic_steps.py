"""Builds steps over made-up sequences, for warm-up and for the self-checks of kernels and models."""

from collections.abc import Iterable, Iterator, Sequence

from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as EngineSequence

LONG_TOKENS = 1024
"""Length of the longer decode in a warm-up: its keys are read in several parts."""
_TOKEN_STRIDE = 37

Part = tuple[int, int, int]
"""Tokens `start` to `end` of a sequence: (sequence, start, end)."""


class SyntheticSequences:
    """Sequences of `lengths` tokens, whose blocks are interleaved and in descending order.

    So a kernel that ignores block tables is detected. `num_blocks`: blocks of the pool, the null block
    included. `in_null_block`: all blocks are the null block, which needs no pool of their own.
    """

    def __init__(
        self, lengths: Sequence[int], block_size: int, vocab_size: int = 2, *, in_null_block: bool = False
    ) -> None:
        self._builder = InputBuilder(len(lengths), max(lengths), block_size)
        widths = [-(-length // block_size) for length in lengths]
        self.num_blocks = 1 + sum(widths)
        blocks = iter(range(self.num_blocks - 1, 0, -1))
        tables: list[list[int]] = [[] for _ in lengths]
        for column in range(max(widths)):
            for table, width in zip(tables, widths, strict=True):
                if column < width:
                    table.append(0 if in_null_block else next(blocks))
        self._sequences: list[EngineSequence] = []
        num_tokens = 0
        for slot, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            indices = range(num_tokens, num_tokens + length)
            token_ids = [1 + index * _TOKEN_STRIDE % (vocab_size - 1) for index in indices]
            sequence = EngineSequence(f"synthetic-{slot}", token_ids, SamplingParams(), arrival_time=0.0)
            sequence.admit(slot)
            sequence.block_table = table
            self._sequences.append(sequence)
            num_tokens += length

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each sequence."""
        return [sequence.token_ids for sequence in self._sequences]

    def step(self, parts: Iterable[Part], *, logits: bool = True) -> SchedulerOutputs:
        """A step that computes `parts`, with logits for all of their tokens or for none."""
        items = []
        for index, start, end in parts:
            logits_from = 0 if logits else end - start
            items.append(ScheduledSequence(self._sequences[index], start, end - start, logits_from, False))
        return SchedulerOutputs(prefill=tuple(items))

    def inputs(self, parts: Iterable[Part], *, logits: bool = True) -> StepInputs:
        """The arrays of that step, on the host."""
        return self._builder.build(self.step(parts, logits=logits))


def null_inputs() -> StepInputs:
    """One token in the null block, without logits: shows whether a device computes at all."""
    return SyntheticSequences([1], 2, in_null_block=True).inputs([(0, 0, 1)], logits=False)


def warm_up_inputs(max_model_len: int, block_size: int) -> Iterator[StepInputs]:
    """Steps in the null block that launch every variant of a kernel, which compiles it.

    Triton compiles a variant on its first launch. A chunk of a prompt, a decode with a short block table and
    one with a long table use different variants.
    """
    for length in sorted({1, min(LONG_TOKENS, max_model_len)}):
        sequences = SyntheticSequences([length, 2], block_size, in_null_block=True)
        yield sequences.inputs([(0, length - 1, length), (1, 0, 2)])
