"""Shows the messages of a request as the input items of a response. Pure functions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from api.problems import bad_field
from api.schemas.openai.responses import split_instructions

MAX_ITEMS = 100


class InputItemsQuery(BaseModel):
    """Which items, and in which order."""

    after: str | None = Field(None, description="The `id` of the item before the first one.")
    limit: int = Field(20, ge=1, le=MAX_ITEMS, description="How many items at most.")
    order: Literal["asc", "desc"] = Field("desc", description="`asc`: in the order of the chat.")


def input_page(task_id: str, messages: Sequence[Mapping[str, Any]], query: InputItemsQuery) -> dict[str, Any]:
    """A page of the input, without the instructions. Raises `Problem` (400)."""
    items = list(_items(task_id, messages))
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise bad_field("after", "is not an item of this response")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def _items(task_id: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(split_instructions(messages)[1]):
        own_id = f"msg_{task_id}_in{number}"
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            result = {"call_id": message.get("tool_call_id"), "output": message["content"]}
            yield {"id": f"fco_{task_id}_in{number}", "type": "function_call_output", **result}
        elif message["content"] or not calls:
            yield _message(own_id, message)
        for call_number, call in enumerate(calls):
            yield _call(f"fc_{task_id}_in{number}_{call_number}", call)


def _message(item_id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "input_text", "text": message["content"]}
    if message["role"] == "assistant":
        part |= {"type": "output_text", "annotations": [], "logprobs": []}
    return {
        "id": item_id,
        "type": "message",
        "role": message["role"],
        "status": "completed",
        "content": [part],
    }


def _call(item_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    return {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call.get("id"),
        "name": function["name"],
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    }
