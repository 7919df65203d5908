"""Turns a scheduler's decision into the flat arrays of one forward, all of them on the host.

Law: the arrays say nothing but what the decision says, so building them again changes nothing. Block tables
stay here from step to step, a row for each slot, and only grow while a sequence keeps its slot; behind its
blocks, and where there is no sequence, a row names the null block. Everything else is made anew. This file
does not know models, devices or how a pool is laid out.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import BlockTableOverrun
from engine.execution.attention.interface import AttentionBatch, Chunk
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sequence import Sequence

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward. `token_ids`, `positions` [tokens]; `logits_rows`: the rows whose logits are wanted.

    `drawn`: tokens on the device, of which those stand for the one at place p whose id is -1 - p; None: the
    host knows all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    batch: AttentionBatch
    drawn: torch.Tensor | None = None

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` of this step, on the device, with the drawn ones in their places.

        Where an error was drawn it is token 0: its sequence ends by that, and nobody reads what it writes.
        """
        if self.drawn is None or not len(self.drawn):
            return token_ids
        places = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self.drawn[places].clamp_(min=0), token_ids)


class BlockTables:
    """Each slot's block table as a row of one array, filled up with the null block 0."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.array: Integers = np.zeros((num_slots, max_blocks), dtype=np.int64)
        self._block_size = block_size
        # Who sits there, in which of its lives, and how many of its blocks are written down.
        self._owners: list[tuple[Sequence, int] | None] = [None] * num_slots
        self._lengths = [0] * num_slots

    def release(self, slot: int) -> None:
        """Clear the row of a slot that lost its sequence."""
        self._owners[slot] = None
        self.array[slot, : self._lengths[slot]] = 0
        self._lengths[slot] = 0

    def update(self, item: ScheduledSequence) -> int:
        """Write down the blocks that the sequence has now; returns its slot.

        Raises `BlockTableOverrun` if these do not hold all tokens that the step computes: keys and values
        would be written to a block of another sequence.
        """
        sequence = item.sequence
        slot = sequence.slot
        if slot is None:
            raise ValueError(f"{sequence.request_id} was scheduled without a slot")
        table, end = sequence.block_table, item.start + item.num_new_tokens
        if end > len(table) * self._block_size:
            raise BlockTableOverrun(
                f"{sequence.request_id}/{sequence.index} computes tokens {item.start} to {end}, "
                f"but holds {len(table)} blocks of {self._block_size}"
            )
        owner = self._owners[slot]
        # Compared by identity and life: a preempted sequence may come back to its old slot with other blocks.
        if owner is None or owner[0] is not sequence or owner[1] != sequence.num_preemptions:
            self.release(slot)
            self._owners[slot] = (sequence, sequence.num_preemptions)
        known = self._lengths[slot]
        if len(table) != known:
            self.array[slot, known : len(table)] = table[known:]
            self._lengths[slot] = len(table)
        return slot


class InputBuilder:
    """Builds `StepInputs` for up to `max_num_seqs` sequences of up to `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = BlockTables(max_num_seqs, -(-max_model_len // block_size), block_size)

    def build(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> StepInputs:
        """The decision's sequences in the order of `outputs.scheduled`, their tokens one after the other.

        Raises `BlockTableOverrun`.
        """
        for slot in outputs.released_slots:
            self._tables.release(slot)
        items = outputs.scheduled
        rows = _Rows(items, [self._tables.update(item) for item in items])
        block_size, table = self._block_size, self._tables.array
        blocks = table[rows.slots[rows.items], rows.positions // block_size]
        return StepInputs(
            token_ids=torch.from_numpy(_integers(_token_ids(items))),
            positions=torch.from_numpy(rows.positions),
            logits_rows=torch.from_numpy(rows.wanted),
            batch=AttentionBatch(
                slot_mapping=torch.from_numpy(blocks * block_size + rows.positions % block_size),
                blocks_begun=torch.from_numpy(self._blocks_begun(rows)),
                decode_rows=torch.from_numpy(rows.first_rows[rows.singles]),
                decode_lengths=torch.from_numpy(rows.ends[rows.singles]),
                decode_tables=torch.from_numpy(self._single_tables(rows)),
                chunks=tuple(self._chunk(rows, item) for item in np.flatnonzero(~rows.singles)),
            ),
            drawn=drawn,
        )

    def _blocks_begun(self, rows: "_Rows") -> Integers:
        last_blocks = (rows.ends - 1) // self._block_size
        begun = (last_blocks * self._block_size >= rows.starts) & (rows.ends % self._block_size != 0)
        blocks: Integers = self._tables.array[rows.slots[begun], last_blocks[begun]]
        return blocks

    def _single_tables(self, rows: "_Rows") -> Integers:
        """Only blocks that hold tokens: a table may name others already, and nobody wrote these."""
        num_blocks = -(-rows.ends[rows.singles] // self._block_size)
        width = int(num_blocks.max(initial=0))
        tables: Integers = self._tables.array[rows.slots[rows.singles], :width]
        tables[np.arange(width) >= num_blocks[:, None]] = 0
        return tables

    def _chunk(self, rows: "_Rows", item: np.int64) -> Chunk:
        num_blocks = -(-rows.ends[item] // self._block_size)
        table = self._tables.array[rows.slots[item], :num_blocks].copy()
        return Chunk(
            first_row=int(rows.first_rows[item]),
            num_rows=int(rows.counts[item]),
            start=int(rows.starts[item]),
            table=torch.from_numpy(table),
        )


def null_inputs() -> StepInputs:
    """One token of nobody, in the null block, with no logits: shows whether a device can compute at all."""
    zero = torch.zeros(1, dtype=torch.int64)
    batch = AttentionBatch(
        slot_mapping=zero,
        blocks_begun=zero,
        decode_rows=zero,
        decode_lengths=zero + 1,
        decode_tables=zero[None],
        chunks=(),
    )
    return StepInputs(token_ids=zero, positions=zero, logits_rows=zero[:0], batch=batch)


class _Rows:
    """The same decision by item (slot, start, count, end, first row) and by row (its item, its position)."""

    def __init__(self, items: tuple[ScheduledSequence, ...], slots: list[int]) -> None:
        _, starts, counts, logits_from, _ = zip(*items, strict=True) if items else ((),) * 5
        self.slots = _integers(slots)
        self.starts = _integers(starts)
        self.counts = _integers(counts)
        self.ends = self.starts + self.counts
        if counts.count(1) == len(items) and not any(logits_from):
            # As below, and what most steps are: no chunk among them.
            self.positions = self.starts
            self.items = self.first_rows = self.wanted = np.arange(len(items))
            self.singles = np.ones(len(items), dtype=np.bool_)
            return
        self.first_rows = np.cumsum(self.counts) - self.counts
        self.singles = self.counts == 1
        self.items = np.repeat(np.arange(len(items)), self.counts)
        offsets = np.arange(len(self.items)) - self.first_rows[self.items]
        self.positions = self.starts[self.items] + offsets
        self.wanted = np.flatnonzero(offsets >= _integers(logits_from)[self.items])


def _integers(values: Collection[int]) -> Integers:
    # A third of the time of `np.array`, which first looks for what they are.
    return np.fromiter(values, dtype=np.int64, count=len(values))


def _token_ids(items: tuple[ScheduledSequence, ...]) -> list[int]:
    token_ids: list[int] = []
    for item in items:
        token_ids += item.sequence.token_ids[item.start : item.start + item.num_new_tokens]
    return token_ids
