"""Groups the events of a task into deltas of its outputs, and says why a task failed. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.problems import Problem
from tokenmill.protocol.messages import Event, FinishedEvent

STATUS_BY_TYPE = {"invalid_request_error": 400, "timeout_error": 504}
"""HTTP status by the type of a task's error; 500 for any other."""
NOT_RETRIED = {"x-should-retry": "false"}
"""OpenAI's clients retry 409 and 5xx unless they read this."""


@dataclass(slots=True)
class Delta:
    """Consecutive events of one output. `finish_reason`: None until it ends.

    `logprobs`: one mapping for each token, as the worker publishes them. `prompt_logprobs`: the same for the
    prompt, None for its first token; empty except with a first token, and if they were not requested.
    """

    index: int
    text: str
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: Sequence[Mapping[str, Any] | None] = ()


def to_deltas(events: Sequence[Event], first_index: int = 0) -> list[Delta]:
    """Merge consecutive events of the same output. `first_index` is added to each index."""
    deltas: list[Delta] = []
    for event in events:
        index = first_index + event.index
        if not deltas or deltas[-1].index != index or deltas[-1].finish_reason:
            deltas.append(Delta(index, ""))
        delta = deltas[-1]
        delta.text += event.text
        if isinstance(event, FinishedEvent):
            delta.finish_reason = event.finish_reason
            continue
        delta.prompt_logprobs = delta.prompt_logprobs or event.prompt_logprobs or ()
        if event.logprobs is not None:
            delta.logprobs.append(event.logprobs)
    return deltas


def to_problem(end: FinishedEvent) -> Problem | None:
    """The error reply for a task that did not complete; None if it did."""
    if end.error:
        kind, code = str(end.error["type"]), str(end.error["code"])
        status = STATUS_BY_TYPE.get(kind, 500)
        # A time limit of the request itself: only the client knows whether it should be sent again.
        headers = NOT_RETRIED if status == 504 else {}
        return Problem(status, code, str(end.error["message"]), param=end.error.get("param"), headers=headers)
    if end.finish_reason == "cancelled":
        return Problem(409, "task_cancelled", "the task was cancelled", headers=NOT_RETRIED)
    return None
