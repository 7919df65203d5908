"""The input items of a response, as messages of a chat."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from api.schemas.openai.chat import TEXT_OR_PARTS, CalledTool, ChatMessage, to_text
from api.schemas.openai.shared import Tolerant
from api.schemas.requests import MAX_MESSAGES


class InputMessage(ChatMessage):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]


class FunctionCallItem(Tolerant):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Tolerant):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str, BeforeValidator(to_text), WithJsonSchema(TEXT_OR_PARTS)]


class ReasoningItem(Tolerant):
    """How another model came to its answer. It is left out: chat templates have no place for it."""

    type: Literal["reasoning"]


Item = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem
_KINDS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


def read_items(values: Iterable[object]) -> list[Item]:
    """Raises ValueError. The type of an item decides how it is read."""
    return [_to_item(number, value) for number, value in enumerate(values)]


def _to_items(value: object) -> object:
    """A text is a message of the user."""
    if isinstance(value, str):
        return read_items([{"role": "user", "content": value}])
    return read_items(value) if isinstance(value, list) and len(value) <= MAX_MESSAGES else value


def _to_item(number: int, item: object) -> Item:
    kind = item.get("type") or "message" if isinstance(item, dict) else "message"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ValueError(
            f"item {number} is of type {str(kind)[:40]!r}; this service reads messages, function calls and "
            "their outputs"
        )
    try:
        return model.model_validate(item if not isinstance(item, dict) else {**item, "type": kind})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in (number, *first["loc"]))
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


InputItems = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_to_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def to_turns(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The messages of a chat template. Calls join the assistant's message before them."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputMessage):
            turn = item.to_turn()
            turn.pop("type")
            turns.append(turn)
        elif isinstance(item, FunctionCallItem):
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(_to_call(item))
        elif isinstance(item, FunctionOutputItem):
            turns.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    return turns


def _to_call(item: FunctionCallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return CalledTool.model_validate({"id": item.call_id, "function": function}).model_dump()
