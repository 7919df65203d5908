"""The inputs of captured decode steps, in tensors with fixed addresses.

Rows after the step's own are padding: token 0 at position 0, in slot 0 of the null block, of length 1. Block
tables are as wide as the longest sequence allowed: the cost of attention depends on lengths, so graphs for
several widths would gain nothing. Only the columns in use are copied.
"""

from typing import NamedTuple

import torch

from engine.execution.attention.interface import DecodeRows
from engine.execution.machine.async_copy import host_buffer
from engine.execution.runner.inputs import StepInputs
from engine.execution.runner.transfers import aligned

NUM_FIELDS = 4
"""Token, position, slot and length of a row."""
PADDING = torch.tensor([0, 0, 0, 1])[:, None]


class DecodeInputs(NamedTuple):
    """One forward pass of `rows`. `token_ids`, `positions` and `all_rows`, their indices: [rows]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    all_rows: torch.Tensor
    rows: DecodeRows


class DecodeBuffers:
    """Buffers for up to `max_rows` rows with block tables of `table_width` blocks."""

    def __init__(self, max_rows: int, table_width: int, device: torch.device) -> None:
        capacity = aligned(max_rows)
        self._device = device
        self._fields = PADDING.repeat(1, capacity).to(device)
        self._tables = torch.zeros(capacity, table_width, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(capacity, device=device)

    def first(self, size: int) -> DecodeInputs:
        """Views of the first `size` rows, which later writes change."""
        token_ids, positions, slots, lengths = self._fields[:, :size]
        rows = DecodeRows(slots, lengths, self._tables[:size])
        return DecodeInputs(token_ids, positions, self._all_rows[:size], rows)

    def clear(self) -> None:
        """Fill all rows with padding."""
        self._fields.copy_(PADDING)
        self._tables.zero_()

    def write(self, inputs: StepInputs, size: int) -> None:
        """Write a decode step to the first of `size` rows and padding to the others."""
        width = inputs.batch.decode_tables.shape[1]
        buffer = host_buffer((size * (NUM_FIELDS + width),), self._device)
        pack_step(inputs, size, buffer)
        moved = buffer.to(self._device, non_blocking=True)
        self._fields[:, :size] = moved[: size * NUM_FIELDS].view(NUM_FIELDS, size)
        token_ids = self._fields[0, :size]
        token_ids.copy_(inputs.known(token_ids))
        self._tables[:size, :width] = moved[size * NUM_FIELDS :].view(size, width)


def pack_step(inputs: StepInputs, size: int, buffer: torch.Tensor) -> None:
    """Write fields [`NUM_FIELDS`, size] and tables [size, width of the step's tables] to `buffer`."""
    batch = inputs.batch
    count, width = batch.decode_tables.shape
    fields = buffer[: size * NUM_FIELDS].view(NUM_FIELDS, size)
    columns = (inputs.token_ids, inputs.positions, batch.slot_mapping, batch.decode_lengths)
    for field, values in zip(fields, columns, strict=True):
        field[:count] = values
    fields[:, count:] = PADDING
    tables = buffer[size * NUM_FIELDS :].view(size, width)
    tables[:count] = batch.decode_tables
    tables[count:] = 0
