"""Turns a line of a batch into tasks, and ended tasks into the line of its result."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from api.problems import Problem, bad_field, from_validation
from api.routes.openai.deltas import Delta, to_deltas, to_problem
from api.routes.openai.response_view import response_of
from api.routes.openai.whole_reply import (
    Format,
    chat_format,
    common_members,
    text_format,
    whole_reply,
)
from api.schemas.openai.chat import ChatCompletionBody
from api.schemas.openai.responses import ResponseBody
from api.schemas.openai.shared import CompletionFields
from api.schemas.openai.text import CompletionBody
from api.schemas.requests import TaskBody
from tokenmill.protocol import naming
from tokenmill.protocol.messages import FinishedEvent, GenerateRequest
from tokenmill.protocol.snapshots import Reading

PRIORITY = naming.PRIORITIES[-1]
"""Lines run after all other tasks; ageing lets them pass nevertheless."""
KINDS: dict[str, type[CompletionFields]] = {
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
}
"""The bodies of the endpoints that a batch may call."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of a line. `is_error`: it belongs into the file of errors."""

    number: int
    data: bytes
    is_error: bool
    task_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTasks:
    """The tasks of a line. Their ids depend on the batch and the line alone."""

    number: int
    custom_id: str
    body: CompletionFields
    tasks: Sequence[TaskBody]
    task_ids: Sequence[str]


def line_tasks(
    batch_id: str, number: int, custom_id: str, endpoint: str, values: dict[str, Any]
) -> LineTasks:
    """The tasks for the body of a line. Raises `Problem` (400) for a body that the endpoint refuses."""
    try:
        body = KINDS[endpoint].model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from error
    if body.stream:
        raise bad_field("stream", "must not be true in a batch", "unsupported_field")
    tasks = [task.model_copy(update={"priority": PRIORITY}) for task in _to_tasks(body)]
    return LineTasks(
        number=number,
        custom_id=custom_id,
        body=body,
        tasks=tasks,
        task_ids=[_task_id(batch_id, number, index) for index in range(len(tasks))],
    )


def _to_tasks(body: CompletionFields) -> Sequence[TaskBody]:
    if isinstance(body, CompletionBody):
        return body.to_tasks("continue")
    if isinstance(body, ChatCompletionBody):
        return [body.to_task("continue")]
    assert isinstance(body, ResponseBody)
    if body.previous_response_id is not None:
        raise bad_field("previous_response_id", "is not supported in a batch", "unsupported_field")
    return [body.to_task("continue", [])]


def _task_id(batch_id: str, number: int, index: int) -> str:
    """A task id with the time of the batch."""
    created = batch_id.removeprefix("batch_")[:12]
    return created + hashlib.sha256(f"{batch_id}/{number}/{index}".encode()).hexdigest()[:20]


def result_of(
    line: LineTasks,
    readings: Sequence[Reading],
    request_of: Callable[[str], GenerateRequest | None],
    tool_format: str,
) -> LineResult:
    """The result of a line whose tasks have ended, as its endpoint would reply."""
    try:
        reply = _reply(line, readings, request_of, tool_format)
    except Problem as problem:
        return problem_result(line.number, line.custom_id, line.task_ids, problem)
    return _responded(line.number, line.custom_id, line.task_ids, 200, reply)


def problem_result(number: int, custom_id: str, task_ids: Sequence[str], problem: Problem) -> LineResult:
    """The result of a line whose call has failed."""
    body = {"error": problem.to_json("")["error"]}
    return _responded(number, custom_id, task_ids, problem.status, body)


def unanswered(number: int, custom_id: str, code: str, message: str) -> LineResult:
    """The result of a line that did not run to its end."""
    error = {"code": code, "message": message}
    line = {"id": _request_id(number), "custom_id": custom_id, "response": None, "error": error}
    return LineResult(number=number, data=(_encode(line) + "\n").encode(), is_error=True)


def _responded(
    number: int, custom_id: str, task_ids: Sequence[str], status: int, body: dict[str, Any]
) -> LineResult:
    request_id = task_ids[0] if task_ids else _request_id(number)
    line = {
        "id": _request_id(number),
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }
    data = (_encode(line) + "\n").encode()
    return LineResult(number=number, data=data, is_error=status >= 400, task_ids=task_ids)


def _request_id(number: int) -> str:
    return f"batch_req_{number}"


def _reply(
    line: LineTasks,
    readings: Sequence[Reading],
    request_of: Callable[[str], GenerateRequest | None],
    tool_format: str,
) -> dict[str, Any]:
    """Raises `Problem` if a task failed."""
    deltas: list[Delta] = []
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    index = 0
    for task, reading in zip(line.tasks, readings, strict=True):
        task_id = reading.snapshot.task_id
        events = [entry.to_event(task_id, seq) for seq, entry in enumerate(reading.entries)]
        end = events[-1] if events else None
        if not isinstance(end, FinishedEvent):
            raise Problem(500, "task_lost", f"the end of task {task_id} is missing")
        if problem := to_problem(end):
            raise problem
        deltas += to_deltas(events, index)
        index += task.sampling_params.n
        for name in usage:
            usage[name] += (end.usage or {}).get(name, 0)
    body, first = line.body, readings[0].snapshot
    if isinstance(body, ResponseBody):
        request = request_of(first.task_id)
        if request is None:
            raise Problem(500, "task_lost", f"the request of task {first.task_id} is missing")
        return response_of(readings[0], request, tool_format)
    style: Format
    if isinstance(body, ChatCompletionBody):
        style = chat_format(body, first.task_id, lambda: tool_format)
    else:
        assert isinstance(body, CompletionBody)
        style = text_format(body)
    return whole_reply(style, common_members(style, first), deltas, usage)
