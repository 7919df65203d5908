"""What a task's log says of its outputs, read the same way by worker and API. Pure functions.

Law: the log decides. Tokens that it holds are never drawn again, and an end that it holds is the end.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.protocol.messages import LogEntry


@dataclass(slots=True, kw_only=True)
class TaskOutput:
    """One output of a task as far as it has come. `finish_reason`: None until it has ended.

    `logprobs`: one for each of `token_ids`; None where they were not asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


def outputs_of(entries: Iterable[LogEntry], num_outputs: int = 1) -> list[TaskOutput]:
    """All outputs of a task, by index, also those that have not begun."""
    outputs = {index: TaskOutput(index=index) for index in range(num_outputs)}
    pieces: dict[int, list[str]] = {index: [] for index in outputs}
    for entry in entries:
        index = int(entry.index)
        _add(outputs.setdefault(index, TaskOutput(index=index)), entry)
        pieces.setdefault(index, []).append(json.loads(entry.text))
    for index, output in outputs.items():
        output.text = "".join(pieces[index])
    return [outputs[index] for index in sorted(outputs)]


def _add(output: TaskOutput, entry: LogEntry) -> None:
    if entry.is_end:
        output.finish_reason = members_of(entry)["finish_reason"]
        return
    output.token_ids.append(int(entry.token))
    if entry.members and (logprobs := members_of(entry).get("logprobs")):
        if output.logprobs is None:
            output.logprobs = []
        output.logprobs.append(logprobs)


def num_tokens_of(entries: Iterable[LogEntry]) -> int:
    """The tokens that were published, of all outputs together."""
    return sum(not entry.is_end for entry in entries)


def prompt_logprobs_of(entries: Iterable[LogEntry]) -> list[dict[str, Any] | None] | None:
    """Those of the prompt's tokens, which came with a first token; None where there are none."""
    # Where text has these words, its quotation marks are escaped.
    told = next((entry for entry in entries if '"prompt_logprobs":' in entry.members), None)
    logprobs: list[dict[str, Any] | None] | None = members_of(told)["prompt_logprobs"] if told else None
    return logprobs


def has_ended(entries: Sequence[LogEntry]) -> bool:
    """The last entry ends the whole task: there is nothing to run, only to settle."""
    return bool(entries) and bool(members_of(entries[-1]).get("done"))


def members_of(entry: LogEntry) -> dict[str, Any]:
    """What a message has beyond token and text: of an end `finish_reason`, `usage`, `error` ..."""
    members: dict[str, Any] = json.loads(f"{{{entry.members}}}")
    return members
