"""How a task's log is asked for, and how its rows become events. Pure functions for both kinds of client."""

from collections.abc import Iterable, Mapping

from tokenmill.protocol.messages import Event, LogEntry, decode, entry_seq

MAX_SEQ = 2**53
"""No log is ever so long; larger numbers do not fit a stream's ids."""
PAGE = 1000
"""Entries that one call reads: Redis serves nobody else meanwhile, and a log may be tens of megabytes."""

Row = tuple[bytes, Mapping[bytes, bytes]]
"""An entry of a stream as redis-py gives it: id, fields."""


def first_id(after: int) -> str:
    """The id of the first entry whose `seq` is greater than `after`; -1 or less means all."""
    return f"0-{min(max(after, -1), MAX_SEQ) + 2}"


def events(task_id: str, rows: Iterable[Row]) -> list[Event]:
    """Raises `ProtocolError` for a row that this version does not write."""
    return [
        decode(LogEntry.of_fields(fields).to_message(task_id, entry_seq(entry_id)))
        for entry_id, fields in rows
    ]
