"""What a task's log says of its outputs, read the same way by worker and API. Pure functions.

Law: the log decides. Tokens that it holds are never drawn again, and an end that it holds is the end.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.protocol.messages import LogEntry


@dataclass(slots=True, kw_only=True)
class TaskOutput:
    """One output of a task as far as it has come. `finish_reason`: None until it has ended."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def outputs_of(entries: Iterable[LogEntry]) -> list[TaskOutput]:
    """One for each index that has begun, in order; the first always."""
    outputs = {0: TaskOutput(index=0)}
    pieces: dict[int, list[str]] = {0: []}
    for entry in entries:
        index = int(entry.index)
        output = outputs.setdefault(index, TaskOutput(index=index))
        pieces.setdefault(index, []).append(json.loads(entry.text))
        if entry.token:
            output.token_ids.append(int(entry.token))
        if entry.end:
            output.finish_reason = end_of(entry)["finish_reason"]
    for index, output in outputs.items():
        output.text = "".join(pieces[index])
    return [outputs[index] for index in sorted(outputs)]


def token_ids_of(entries: Iterable[LogEntry]) -> list[int]:
    """The tokens that were published, in order."""
    return [int(entry.token) for entry in entries if entry.token]


def has_ended(entries: Sequence[LogEntry]) -> bool:
    """The last entry ends the whole task: there is nothing to run, only to settle."""
    return bool(entries) and bool(end_of(entries[-1]).get("done"))


def end_of(entry: LogEntry) -> dict[str, Any]:
    """The members that an end has and a token has not: `finish_reason`, `usage`, `error` ..."""
    members: dict[str, Any] = json.loads(f"{{{entry.end}}}")
    return members
