"""Turns a scheduler's decision into the flat arrays of one forward pass, on the host.

Building a step again gives the same arrays. Only block tables persist between steps: one row per slot, which
grows while a sequence keeps its slot and is padded with the null block.
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
    """One forward pass. `token_ids`, `positions` [tokens]; `logits_rows`: rows whose logits are wanted.

    `drawn`: tokens on the device that the host does not know yet: token id -1 - i stands for `drawn[i]`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    batch: AttentionBatch
    drawn: torch.Tensor | None = None

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` of this step, on the device, with placeholders replaced by drawn tokens.

        A drawn error becomes token 0: its sequence ends, so what it writes is never read.
        """
        if self.drawn is None or not len(self.drawn):
            return token_ids
        indices = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self.drawn[indices].clamp_(min=0), token_ids)


class BlockTables:
    """The block table of each slot, as a row of one array padded with the null block 0."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.array: Integers = np.zeros((num_slots, max_blocks), dtype=np.int64)
        self._block_size = block_size
        # Per slot: the sequence with its number of preemptions, and the number of blocks in its row.
        self._owners: list[tuple[Sequence, int] | None] = [None] * num_slots
        self._lengths = [0] * num_slots

    def release(self, slot: int) -> None:
        """Clear the row of a slot whose sequence left."""
        self._owners[slot] = None
        self.array[slot, : self._lengths[slot]] = 0
        self._lengths[slot] = 0

    def update(self, item: ScheduledSequence) -> int:
        """Copy the sequence's current block table into its row; returns its slot.

        Raises `BlockTableOverrun` if its blocks do not hold all tokens of the step: keys and values would be
        written to a block of another sequence.
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
        # A preempted sequence may return to its old slot with other blocks.
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
        """Arrays with the tokens of `outputs.scheduled`, in order.

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
                decode_rows=torch.from_numpy(rows.first_rows[rows.decodes]),
                decode_lengths=torch.from_numpy(rows.ends[rows.decodes]),
                decode_tables=torch.from_numpy(self._decode_tables(rows)),
                chunks=tuple(self._chunk(rows, item) for item in np.flatnonzero(~rows.decodes)),
            ),
            drawn=drawn,
        )

    def _blocks_begun(self, rows: "_Rows") -> Integers:
        last_blocks = (rows.ends - 1) // self._block_size
        begun = (last_blocks * self._block_size >= rows.starts) & (rows.ends % self._block_size != 0)
        blocks: Integers = self._tables.array[rows.slots[begun], last_blocks[begun]]
        return blocks

    def _decode_tables(self, rows: "_Rows") -> Integers:
        """Only blocks that hold tokens; a table may already have blocks that were never written."""
        num_blocks = -(-rows.ends[rows.decodes] // self._block_size)
        width = int(num_blocks.max(initial=0))
        tables: Integers = self._tables.array[rows.slots[rows.decodes], :width]
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


class _Rows:
    """The decision as arrays: per item (slot, start, count, end, first row) and per row (item, position)."""

    def __init__(self, items: tuple[ScheduledSequence, ...], slots: list[int]) -> None:
        _, starts, counts, logits_from, _ = zip(*items, strict=True) if items else ((),) * 5
        self.slots = _integers(slots)
        self.starts = _integers(starts)
        self.counts = _integers(counts)
        self.ends = self.starts + self.counts
        if counts.count(1) == len(items) and not any(logits_from):
            # Fast path for the common step: decodes only.
            self.positions = self.starts
            self.items = self.first_rows = self.wanted = np.arange(len(items))
            self.decodes = np.ones(len(items), dtype=np.bool_)
            return
        self.first_rows = np.cumsum(self.counts) - self.counts
        self.decodes = self.counts == 1
        self.items = np.repeat(np.arange(len(items)), self.counts)
        offsets = np.arange(len(self.items)) - self.first_rows[self.items]
        self.positions = self.starts[self.items] + offsets
        self.wanted = np.flatnonzero(offsets >= _integers(logits_from)[self.items])


def _integers(values: Collection[int]) -> Integers:
    # Three times as fast as `np.array`, which first looks for a common type.
    return np.fromiter(values, dtype=np.int64, count=len(values))


def _token_ids(items: tuple[ScheduledSequence, ...]) -> list[int]:
    token_ids: list[int] = []
    for item in items:
        token_ids += item.sequence.token_ids[item.start : item.start + item.num_new_tokens]
    return token_ids
