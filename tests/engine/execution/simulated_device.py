"""A simulated device whose KV pool holds one number per position, so that wrong reads and writes show.

The value of a position depends on its token and on all values before it, which are read from the pool through
the arrays of `InputBuilder`. A row that reads another sequence's values or overwritten values samples other
tokens than the same request alone.
"""

import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from engine.config import EngineConfig
from engine.execution.runner.inputs import InputBuilder
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sequence import Sequence
from tests.engine.fakes import EOS

NON_FINITE = "the model computed non-finite logits"
NUM_TOKENS = 60
"""Ids 1 to 60 are sampled, and `EOS` in one of 100 draws."""
_MASK = 2**62 - 1


class Row(NamedTuple):
    """Represents a row of logits."""

    value: int
    is_finite: bool


class SimulatedDevice:
    """A runner and its sampler. The pool starts full of non-finite values.

    `poison`: a token with non-finite values. `glitch_rate`: the share of rows that become non-finite at
    random, with `rng`. `num_glitches` counts them.
    """

    def __init__(
        self,
        config: EngineConfig,
        rng: random.Random,
        *,
        poison: int | None = None,
        glitch_rate: float = 0.0,
        block_tables: InputBuilder | None = None,
    ) -> None:
        self._block_size = config.block_size
        self._inputs = block_tables or InputBuilder(
            config.max_num_seqs, config.max_model_len, config.block_size
        )
        num_slots = (config.num_kv_blocks + 1) * config.block_size
        self._values = np.zeros(num_slots, dtype=np.int64)
        self._is_finite = np.zeros(num_slots, dtype=np.bool_)
        self._poison = poison
        self._rng = rng
        self.glitch_rate = glitch_rate
        self.num_glitches = 0

    def check(self) -> None:
        """The device always works."""

    def release_memory(self) -> bool:
        return False

    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> list[Row]:
        """The requested rows, in order; see `ModelRunner.execute`."""
        check_writes(outputs, self._block_size)
        self._zero(outputs.blocks_to_zero)
        inputs = self._inputs.build(outputs, drawn)
        token_ids = inputs.known(inputs.token_ids).tolist()
        batch, block_size = inputs.batch, self._block_size
        self._zero(batch.blocks_begun.tolist())
        slots = batch.slot_mapping.tolist()
        rows: dict[int, Row] = {}
        for row, length, table in zip(
            batch.decode_rows.tolist(),
            batch.decode_lengths.tolist(),
            batch.decode_tables.numpy(),
            strict=True,
        ):
            rows |= self._compute(row, token_ids[row : row + 1], slots, length - 1, table)
        for chunk in batch.chunks:
            row, number = chunk.first_row, chunk.num_rows
            rows |= self._compute(row, token_ids[row : row + number], slots, chunk.start, chunk.table.numpy())
        assert max(slots, default=0) < len(self._values)
        assert min(slots, default=block_size) >= block_size, "a token in the null block"
        return [rows[row] for row in inputs.logits_rows.tolist()]

    def sample(self, logits: list[Row], items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        sampled: list[SampledToken] = []
        end = 0
        for item in items:
            end += item.num_new_tokens - item.logits_from
            if item.samples:
                sampled.append(_draw(logits[end - 1], item.sequence))
        return sampled

    def prompt_logprobs(
        self, logits: list[Row], items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        found: list[tuple[ScheduledSequence, list[TokenLogprobs]]] = []
        end = 0
        for item in items:
            begin, end = end, end + item.num_new_tokens - item.logits_from
            first = item.start + item.logits_from + 1
            last = min(first + end - begin, item.sequence.num_prompt_tokens)
            if item.sequence.params.prompt_logprobs is not None and first < last:
                tokens = item.sequence.token_ids[first:last]
                pairs = zip(tokens, logits[begin:end], strict=False)
                found.append((item, [TokenLogprobs(one, -float(row.value % 97)) for one, row in pairs]))
        return found

    def _zero(self, blocks: tuple[int, ...] | list[int]) -> None:
        for block in blocks:
            region = slice(block * self._block_size, (block + 1) * self._block_size)
            self._values[region], self._is_finite[region] = 0, True

    def _compute(
        self, first_row: int, token_ids: list[int], slots: list[int], start: int, table: np.ndarray
    ) -> dict[int, Row]:
        """Write the values from token `start` on, each from those before it. Returns their rows."""
        rows: dict[int, Row] = {}
        for offset, token_id in enumerate(token_ids):
            position = start + offset
            places = np.arange(position)
            read = table[places // self._block_size] * self._block_size + places % self._block_size
            before = int(self._values[read].sum()) & _MASK
            value = hash((token_id, position, before)) & _MASK
            is_finite = bool(self._is_finite[read].all()) and token_id != self._poison
            if self.glitch_rate and self._rng.random() < self.glitch_rate:
                is_finite = False
                self.num_glitches += 1
            slot = slots[first_row + offset]
            # 40 bits, so that the sum of all values before a position stays exact.
            self._values[slot], self._is_finite[slot] = value & (2**40 - 1), is_finite
            rows[first_row + offset] = Row(value, is_finite)
        return rows


class RefusingExecutor:
    """Launches on a `SimulatedDevice`. Refuses items and fails at random.

    Items with log-probabilities are always refused, as on a real device.
    """

    def __init__(
        self, device: SimulatedDevice, rng: random.Random, *, refused: float, fault_rate: float
    ) -> None:
        self._device = device
        self._rng = rng
        self._refused = refused
        self._fault_rate = fault_rate
        self.num_ahead = self.num_refused = self.num_faults = 0

    def can_launch(self, item: ScheduledSequence) -> bool:
        params = item.sequence.params
        accepts = params.prompt_logprobs is None and not (item.samples and params.logprobs is not None)
        accepts = accepts and self._rng.random() >= self._refused
        self.num_refused += not accepts
        return accepts

    def launch(self, outputs: SchedulerOutputs, after: list[SampledToken] | None) -> list[SampledToken]:
        self._fail_sometimes()
        drawn = None
        if after is not None:
            ids = [-1 if one.token_id is None else one.token_id for one in after]
            drawn = torch.tensor(ids, dtype=torch.int64)
            self.num_ahead += 1
        return self._device.sample(self._device.execute(outputs, drawn), outputs.scheduled)

    def fetch(self, launched: list[SampledToken]) -> list[SampledToken]:
        self._fail_sometimes()
        return launched

    def _fail_sometimes(self) -> None:
        if self._rng.random() < self._fault_rate:
            self.num_faults += 1
            raise MemoryError("busy")


def check_writes(outputs: SchedulerOutputs, block_size: int) -> None:
    """Check that no item writes beyond its block table and no block has two writers in one step."""
    writers: Counter[int] = Counter()
    for item in outputs.scheduled:
        table, end = item.sequence.block_table, item.start + item.num_new_tokens
        room = len(table) * block_size
        assert end <= room, f"{item.sequence.request_id} computes up to {end} with room for {room}"
        writers.update(table[item.start // block_size : -(-end // block_size)])
    assert all(number == 1 for number in writers.values()), "a block has two writers"


def check_running(running: list[Sequence], block_size: int) -> None:
    """Check that no sequence computes beyond its blocks or writes where another one reads."""
    holders = Counter(block for one in running for block in one.block_table)
    for one in running:
        assert one.num_computed_tokens <= len(one.block_table) * block_size
        writable = one.block_table[one.num_written_tokens // block_size :]
        assert all(holders[block] == 1 for block in writable), "a block that is being written is shared"


def _draw(row: Row, sequence: Sequence) -> SampledToken:
    if not row.is_finite:
        return SampledToken(None, NON_FINITE)
    number = hash((row.value, sequence.params.seed, sequence.num_output_tokens)) & _MASK
    token_id = EOS if number % 100 == 0 else 1 + number % NUM_TOKENS
    wants_logprobs = sequence.params.logprobs is not None
    logprobs = TokenLogprobs(token_id, -float(row.value % 97)) if wants_logprobs else None
    return SampledToken(token_id, None, logprobs)
