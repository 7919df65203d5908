"""What an earlier attempt had come to, read from the log that it left. Pure functions.

Law: the log decides. Tokens that it holds are never drawn again, and an end that it holds is the end.
"""

import json
from collections.abc import Sequence

from worker.protocol.messages import LogEntry


def output_token_ids(entries: Sequence[LogEntry]) -> list[int]:
    """The tokens that were published, in order."""
    return [int(entry.token) for entry in entries if entry.token]


def has_ended(entries: Sequence[LogEntry]) -> bool:
    """The last entry ends the whole task: there is nothing to run, only to settle."""
    return bool(entries) and bool(end_of(entries[-1]).get("done"))


def end_of(entry: LogEntry) -> dict[str, object]:
    """The members that an end has and a token has not: `finish_reason`, `usage`, `error` ..."""
    members: dict[str, object] = json.loads(f"{{{entry.end}}}")
    return members
