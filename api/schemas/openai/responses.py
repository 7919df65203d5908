"""The body of `POST /v1/responses`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from api.problems import bad_field
from api.schemas.chat_task import ChatTask
from api.schemas.openai.chat import ChatMessage
from api.schemas.openai.shared import CompletionFields, ResponseFormat, Tolerant, to_task
from api.schemas.requests import MAX_MESSAGES

INSTRUCTIONS = "instructions"
"""The name of the message that has the instructions: the next response does not inherit it."""
_UNSUPPORTED: dict[str, Any] = {
    "conversation": None,
    "include": [],
    "n": 1,
    "prompt": None,
    "response_format": None,
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Fields that are refused, unless they have this value or null."""


def _to_messages(value: object) -> object:
    """A text is a message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    for item in value if isinstance(value, list) else ():
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message":
            raise ValueError(f"items of type {str(kind)[:40]!r} are not supported; send messages")
    return value


class InputMessage(ChatMessage):
    """A message of the input. Only messages are supported."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]


class TextFormat(Tolerant):
    """The shape of the text, with the members of a schema at the same level."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    def to_response_format(self) -> ResponseFormat:
        schema = {"schema": self.schema_} if self.type == "json_schema" else None
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextOptions(Tolerant):
    """Options of the text."""

    format: TextFormat | None = None


_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class ResponseBody(CompletionFields):
    """A chat to continue, perhaps in the background. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "What is the capital of France?", "background": True}}
    )

    input: Annotated[
        list[InputMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_to_messages),
        WithJsonSchema(_INPUT_SCHEMA),
    ] = Field(description="Text of the user, or messages.")
    instructions: str | None = Field(None, description="The system message.")
    background: bool | None = Field(
        None, description="Return at once; the task continues without the client."
    )
    store: bool | None = Field(None, description="Every response can be read until its task expires.")
    previous_response_id: str | None = Field(
        None, description="A completed response that this one continues."
    )
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Maximum number of tokens of the output."
    )
    text: TextOptions | None = Field(None, description="The shape of the text.")

    def to_task(self, on_disconnect: str, history: Sequence[dict[str, Any]]) -> ChatTask:
        """The task of this response. `history`: the messages before `input`. Raises `Problem` (400)."""
        self._refuse()
        if self.text and self.text.format:
            self.response_format = self.text.format.to_response_format()
        values = self.task_values()
        if self.max_output_tokens is not None:
            values["max_tokens"] = self.max_output_tokens
        first = {"role": "system", "content": self.instructions, "name": INSTRUCTIONS}
        messages = [first] if self.instructions is not None else []
        for message in self.input:
            turn = message.to_turn()
            turn.pop("type")
            history = [*history, turn]
        values["messages"] = [*messages, *history]
        return to_task(ChatTask, {**values, "on_disconnect": on_disconnect})

    def _refuse(self) -> None:
        self.refuse_unsupported()
        values = {
            **(self.model_extra or {}),
            "n": self.sampling.get("n"),
            "response_format": self.response_format,
        }
        for name, neutral in _UNSUPPORTED.items():
            if values.get(name) is not None and values[name] != neutral:
                raise bad_field(name, "is not supported by this route", "unsupported_field")
        if self.sampling.get("logprobs") is not None:
            raise bad_field("logprobs", "is not supported by this route", "unsupported_field")
        if self.background and self.store is False:
            raise bad_field("store", "must not be false with background: true")
