"""The inputs of decode steps, where a captured forward finds them: always in the same place.

Law: what `write` leaves there is the step and, in all rows behind it, nobody: token 0 at position 0, in slot
0 of the null block, of length 1. This file does not know models or graphs.

Tables are as wide as the longest sequence allowed: what attention costs follows from lengths, so one width
serves all steps, and a graph for each width would buy nothing. Only the columns in use are copied.
"""

from typing import NamedTuple

import torch

from engine.execution.attention.interface import DecodeRows
from engine.execution.machine.async_copy import host_buffer
from engine.execution.runner.inputs import StepInputs
from engine.execution.runner.transfers import aligned

FIELDS = 4
"""Of each row: token, position, slot, length."""
NOBODY = torch.tensor([0, 0, 0, 1])[:, None]


class DecodeInputs(NamedTuple):
    """One forward of `rows`: `token_ids`, `positions`, and all rows' numbers, [rows]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    all_rows: torch.Tensor
    rows: DecodeRows


class DecodeBuffers:
    """For up to `max_rows` rows, whose tables are `table_width` blocks wide."""

    def __init__(self, max_rows: int, table_width: int, device: torch.device) -> None:
        room = aligned(max_rows)
        self._device = device
        self._fields = NOBODY.repeat(1, room).to(device)
        self._tables = torch.zeros(room, table_width, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(room, device=device)

    def first(self, size: int) -> DecodeInputs:
        """The first `size` rows: views, which see whatever is written later."""
        token_ids, positions, slots, lengths = self._fields[:, :size]
        rows = DecodeRows(slots, lengths, self._tables[:size])
        return DecodeInputs(token_ids, positions, self._all_rows[:size], rows)

    def clear(self) -> None:
        """Put nobody into all rows."""
        self._fields.copy_(NOBODY)
        self._tables.zero_()

    def write(self, inputs: StepInputs, size: int) -> None:
        """Put a step of single tokens into the first rows, and nobody into the others of `size` rows."""
        width = inputs.batch.decode_tables.shape[1]
        buffer = host_buffer((size * (FIELDS + width),), self._device)
        pack_step(inputs, size, buffer)
        there = buffer.to(self._device, non_blocking=True)
        self._fields[:, :size] = there[: size * FIELDS].view(FIELDS, size)
        token_ids = self._fields[0, :size]
        token_ids.copy_(inputs.known(token_ids))
        self._tables[:size, :width] = there[size * FIELDS :].view(size, width)


def pack_step(inputs: StepInputs, size: int, buffer: torch.Tensor) -> None:
    """Write fields [`FIELDS`, size] and tables [size, width of the step's tables] into `buffer`."""
    batch = inputs.batch
    count, width = batch.decode_tables.shape
    fields = buffer[: size * FIELDS].view(FIELDS, size)
    for row, values in enumerate(
        (inputs.token_ids, inputs.positions, batch.slot_mapping, batch.decode_lengths)
    ):
        fields[row, :count] = values
    fields[:, count:] = NOBODY
    tables = buffer[size * FIELDS :].view(size, width)
    tables[:count] = batch.decode_tables
    tables[count:] = 0
