"""The log of a task: stream ids, events from its rows, and the outputs that its entries add up to.

Invariant: the log is authoritative. Tokens in it are never sampled again, and an end in it is final.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.protocol.messages import AnyEvent, Event, LogEntry, UnknownEvent

MAX_SEQ = 2**53
"""Upper bound of `seq`: the numbers of Lua scripts are exact up to it."""

PAGE = 1000
"""Entries per read: Redis serves no other client meanwhile, and a log may be tens of megabytes."""

Row = tuple[bytes, Mapping[bytes, bytes]]
"""A stream entry as redis-py returns it: id, fields."""


def first_id(after: int) -> str:
    """The stream id of the first entry with a `seq` greater than `after`; -1 or less selects all."""
    return f"0-{min(max(after, -1), MAX_SEQ) + 2}"


def entry_seq(entry_id: bytes) -> int:
    """The `seq` of the log entry `0-(seq+1)`."""
    return int(entry_id.split(b"-")[1]) - 1


def to_events(task_id: str, rows: Iterable[Row]) -> list[Event]:
    """Convert rows of a log. Raises `ProtocolError` for a row that this version does not write."""
    return [LogEntry.of_fields(fields).to_event(task_id, entry_seq(row_id)) for row_id, fields in rows]


def to_any_events(task_id: str, rows: Iterable[Row]) -> list[AnyEvent]:
    """The same, where a row without a text is of a type that a newer version has added."""
    return [_to_any_event(task_id, entry_seq(row_id), fields) for row_id, fields in rows]


def _to_any_event(task_id: str, seq: int, fields: Mapping[bytes, bytes]) -> AnyEvent:
    if b"x" not in fields:
        return UnknownEvent(id=task_id, seq=seq)
    return LogEntry.of_fields(fields).to_event(task_id, seq)


@dataclass(slots=True, kw_only=True)
class TaskOutput:
    """One output of a task so far. `finish_reason`: None until it has ended.

    `logprobs`: one for each of `token_ids`; None if not requested.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


def outputs_of(entries: Iterable[LogEntry], num_outputs: int = 1) -> list[TaskOutput]:
    """All outputs of a task by index, including those that have not begun."""
    outputs = {index: TaskOutput(index=index) for index in range(num_outputs)}
    pieces: dict[int, list[str]] = {index: [] for index in outputs}
    for entry in entries:
        index = int(entry.index)
        _append(outputs.setdefault(index, TaskOutput(index=index)), entry)
        pieces.setdefault(index, []).append(json.loads(entry.text))
    for index, output in outputs.items():
        output.text = "".join(pieces[index])
    return [outputs[index] for index in sorted(outputs)]


def _append(output: TaskOutput, entry: LogEntry) -> None:
    if entry.is_end:
        output.finish_reason = entry.parse_members()["finish_reason"]
        return
    output.token_ids.append(int(entry.token))
    if entry.members and (logprobs := entry.parse_members().get("logprobs")):
        if output.logprobs is None:
            output.logprobs = []
        output.logprobs.append(logprobs)


def num_tokens_of(entries: Iterable[LogEntry]) -> int:
    """The number of published tokens of all outputs."""
    return sum(not entry.is_end for entry in entries)


def prompt_logprobs_of(entries: Iterable[LogEntry]) -> list[dict[str, Any] | None] | None:
    """The logprobs of the prompt's tokens, stored with a first token; None if not requested."""
    # Quotation marks within a text are escaped, so a text never matches.
    entry = next((entry for entry in entries if '"prompt_logprobs":' in entry.members), None)
    logprobs: list[dict[str, Any] | None] | None = entry.parse_members()["prompt_logprobs"] if entry else None
    return logprobs


def has_ended(entries: Sequence[LogEntry]) -> bool:
    """Whether the last entry ends the whole task, so that only its settlement may be missing."""
    return bool(entries) and bool(entries[-1].parse_members().get("done"))
