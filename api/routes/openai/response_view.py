"""Shows a task as a response object, and its log as the events of a response. Pure functions.

Invariant: the `sequence_number` of an event depends on the log alone, so a stream can be resumed anywhere.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from api.routes.openai.response_items import OutputItems
from api.schemas.openai.responses import split_instructions
from api.schemas.task_view import view
from api.tool_calls.reading import CallReading
from tokenmill.protocol.log import TaskOutput, outputs_of
from tokenmill.protocol.messages import Event as LogEvent
from tokenmill.protocol.messages import GenerateRequest, TokenEvent
from tokenmill.protocol.snapshots import Reading

ID_PREFIX = "resp_"


def new_items(task_id: str, request: GenerateRequest, tool_format: str) -> OutputItems:
    """The items of a task whose output has not begun."""
    functions = [
        (tool["function"]["name"], tool["function"].get("parameters")) for tool in request.tools or ()
    ]
    new_parser = _reading(request).new_parser(functions, tool_format)
    return OutputItems(task_id, new_parser(), tool_format)


def response_of(reading: Reading, request: GenerateRequest, tool_format: str) -> dict[str, Any]:
    """The response object of a task."""
    task = view(reading)
    output = task.outputs[0]
    status = "incomplete" if output.finish_reason == "length" else task.status
    sampling = request.sampling
    shown: dict[str, Any] = {
        "id": ID_PREFIX + task.id,
        "object": "response",
        "created_at": int(task.created_at),
        "model": task.model,
        "status": status,
        "background": not reading.snapshot.cancel_on_disconnect,
        "output": _items(reading, request, tool_format),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": split_instructions(request.messages)[0],
        "max_output_tokens": sampling.get("max_tokens"),
        "metadata": task.metadata or {},
        "parallel_tool_calls": _reading(request).parallel,
        "temperature": sampling.get("temperature"),
        "text": {"format": _text_format(request)},
        "tool_choice": _tool_choice(_reading(request)),
        "tools": [_tool(tool["function"]) for tool in request.tools or ()],
        "top_logprobs": sampling.get("logprobs"),
        "top_p": sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }
    if task.error is not None and status == "failed":
        code = "invalid_prompt" if task.error.type == "invalid_request_error" else "server_error"
        shown["error"] = {"code": code, "message": task.error.message}
    if task.usage is not None and status not in ("queued", "in_progress"):
        shown["usage"] = {
            "input_tokens": task.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": task.usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": task.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": task.usage.total_tokens,
        }
    return shown


def first_events(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The events before the first one of the log: the first two at once, the last when the log begins."""
    queued = {**response, "status": "queued", "output": [], "usage": None, "error": None}
    queued["incomplete_details"] = None
    return [
        {"type": "response.created", "response": queued},
        {"type": "response.queued", "response": queued},
        {"type": "response.in_progress", "response": {**queued, "status": "in_progress"}},
    ]


def item_events(items: OutputItems, event: LogEvent) -> Iterator[dict[str, Any]]:
    """The events for one of the log, also for its last."""
    if event.index == 0:
        yield from items.feed(event.text, _logprobs(event))
    if not isinstance(event, TokenEvent) and event.done:
        yield from items.finish(_last_status(event.finish_reason))


def last_event(response: dict[str, Any]) -> dict[str, Any]:
    """`response`: as it ended. OpenAI's API has no event for a cancelled response."""
    kind = response["status"] if response["status"] in ("completed", "incomplete") else "failed"
    return {"type": f"response.{kind}", "response": response}


def frame(number: int, event: dict[str, Any]) -> bytes:
    """A server-sent event with its sequence number."""
    numbered = {"type": event["type"], "sequence_number": number, **event}
    return f"event: {event['type']}\ndata: {json.dumps(numbered, ensure_ascii=False)}\n\n".encode()


def _items(reading: Reading, request: GenerateRequest, tool_format: str) -> list[dict[str, Any]]:
    if not reading.entries:
        return []
    # A task of another route may have several outputs: its first one is shown.
    output = outputs_of(reading.entries)[0]
    items = new_items(reading.snapshot.task_id, request, tool_format)
    for text, logprobs in _pieces(reading, output, has_tools=bool(request.tools)):
        _discard(items.feed(text, logprobs))
    if output.finish_reason is not None:
        _discard(items.finish(_last_status(output.finish_reason)))
    return items.items


def _pieces(
    reading: Reading, output: TaskOutput, *, has_tools: bool
) -> Iterable[tuple[str, Sequence[Mapping[str, Any]]]]:
    """The text with its log-probabilities: in one piece, unless only a part of it is in messages."""
    if not (has_tools and output.logprobs):
        return [(output.text, output.logprobs or ())]
    entries = [entry for entry in reading.entries if entry.index == "0"]
    events = (entry.to_event(reading.snapshot.task_id, seq) for seq, entry in enumerate(entries))
    return ((event.text, _logprobs(event)) for event in events)


def _logprobs(event: LogEvent) -> Sequence[Mapping[str, Any]]:
    return [event.logprobs] if isinstance(event, TokenEvent) and event.logprobs is not None else ()


def _discard(events: Iterable[dict[str, Any]]) -> None:
    for _ in events:
        pass


def _last_status(finish_reason: str) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"


def _reading(request: GenerateRequest) -> CallReading:
    return CallReading(**request.tool_use) if request.tool_use else CallReading()


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    # Arguments are not checked against the schema.
    tool = {"type": "function", "strict": False, "description": None, "parameters": None}
    return {**tool, **function}


def _tool_choice(reading: CallReading) -> object:
    if reading.mode == "named":
        return {"type": "function", "name": reading.name}
    return reading.mode if reading.mode == "required" else "auto"


def _text_format(request: GenerateRequest) -> dict[str, Any]:
    constraint = request.sampling.get("structured_outputs")
    if not constraint or _reading(request).mode in ("required", "named"):
        return {"type": "text"}
    if constraint.get("json_object"):
        return {"type": "json_object"}
    if "json" in constraint:
        return {"type": "json_schema", "name": "schema", "schema": constraint["json"]}
    return {"type": "text"}
