"""Shows a task as a response object, and its log as the events of a response. Pure functions.

Invariant: the `sequence_number` of an event depends on the log alone, so a stream can be resumed anywhere.
"""

import json
from collections.abc import Iterator
from typing import Any

from api.schemas.openai.responses import INSTRUCTIONS
from api.schemas.task_view import view
from tokenmill.protocol.messages import Event, FinishedEvent, GenerateRequest
from tokenmill.protocol.snapshots import Reading

ID_PREFIX = "resp_"
FIRST_DELTA = 5
"""Sequence number of the log's first event."""


def response_of(reading: Reading, request: GenerateRequest) -> dict[str, Any]:
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
        "output": [_item(task.id, output.text, _item_status(status))] if reading.entries else [],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": _instructions(request),
        "max_output_tokens": sampling.get("max_tokens"),
        "metadata": task.metadata or {},
        "parallel_tool_calls": True,
        "temperature": sampling.get("temperature"),
        "text": {"format": _text_format(sampling.get("structured_outputs"))},
        "tool_choice": "auto",
        "tools": [],
        "top_p": sampling.get("top_p"),
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


def first_events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events before the first one of the log."""
    queued = {**response, "status": "queued", "output": [], "usage": None, "error": None}
    queued["incomplete_details"] = None
    running = {**queued, "status": "in_progress"}
    yield {"type": "response.created", "sequence_number": 0, "response": queued}
    yield {"type": "response.queued", "sequence_number": 1, "response": queued}
    yield {"type": "response.in_progress", "sequence_number": 2, "response": running}
    item = {**_item(_task_id(response), "", "in_progress"), "content": []}
    yield {"type": "response.output_item.added", "sequence_number": 3, "output_index": 0, "item": item}
    yield {
        "type": "response.content_part.added",
        "sequence_number": 4,
        "item_id": item["id"],
        "output_index": 0,
        "content_index": 0,
        "part": _part(""),
    }


def delta_event(event: Event, item_id: str) -> dict[str, Any]:
    """The event for one token or for the text at the end."""
    return {
        "type": "response.output_text.delta",
        "sequence_number": FIRST_DELTA + event.seq,
        "item_id": item_id,
        "output_index": 0,
        "content_index": 0,
        "delta": event.text,
        "logprobs": [],
    }


def last_events(end: FinishedEvent, response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events after the last one of the log. `response`: as it ended."""
    item = response["output"][0]
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    part = item["content"][0]
    number = FIRST_DELTA + end.seq
    yield {
        "type": "response.output_text.done",
        "sequence_number": number + 1,
        **place,
        "text": part["text"],
        "logprobs": [],
    }
    yield {"type": "response.content_part.done", "sequence_number": number + 2, **place, "part": part}
    yield {
        "type": "response.output_item.done",
        "sequence_number": number + 3,
        "output_index": 0,
        "item": item,
    }
    # OpenAI's API has no event for a cancelled response.
    kind = response["status"] if response["status"] in ("completed", "incomplete") else "failed"
    yield {"type": f"response.{kind}", "sequence_number": number + 4, "response": response}


def item_id(response: dict[str, Any]) -> str:
    return f"msg_{_task_id(response)}"


def frame(event: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _task_id(response: dict[str, Any]) -> str:
    return str(response["id"]).removeprefix(ID_PREFIX)


def _item(task_id: str, text: str, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{task_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_status(status: str) -> str:
    if status in ("queued", "in_progress"):
        return "in_progress"
    return "completed" if status == "completed" else "incomplete"


def _instructions(request: GenerateRequest) -> str | None:
    first = (request.messages or ({},))[0]
    return first["content"] if first.get("name") == INSTRUCTIONS else None


def _text_format(constraint: Any) -> dict[str, Any]:
    if not constraint:
        return {"type": "text"}
    if constraint.get("json_object"):
        return {"type": "json_object"}
    if "json" in constraint:
        return {"type": "json_schema", "name": "schema", "schema": constraint["json"]}
    return {"type": "text"}
