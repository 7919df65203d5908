"""The body of `POST /v1/chat/completions`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from api.problems import bad_field
from api.schemas.chat_task import ChatTask
from api.schemas.openai.shared import CompletionFields, Tolerant, to_task
from api.schemas.openai.tools import MAX_TOOLS, ToolChoiceField, ToolDefinition, ToolUse
from api.schemas.requests import MAX_MESSAGES
from engine.sampling_params import MAX_LOGPROBS

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of the content parts that are text, and the member that has it."""
_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
     "tokenize", "return_dict", "return_tensors", "documents"}
)  # fmt: skip
"""Arguments of the renderer that a request may not set."""


def to_text(content: object) -> object:
    """Joins text parts with line breaks, as vLLM does for templates that expect a string."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_part_text(number, part) for number, part in enumerate(content))


def _part_text(number: int, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError(f"part {number} must be an object with a type")
    if kind not in _TEXT_PARTS:
        raise ValueError(f"part {number} is of type {kind[:40]!r}; this service reads text parts only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"part {number} must have its text in {_TEXT_PARTS[kind]!r}")
    return text


def _to_arguments(arguments: object) -> object:
    """Chat templates expect an object. Text that is not one, as of a call that was cut short, is kept."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
        # Refuses NaN and lone surrogates, which an escape may hide.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


TEXT_OR_PARTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class CalledFunction(Tolerant):
    """The function of a call."""

    name: str
    arguments: Annotated[
        dict[str, Any] | str, BeforeValidator(_to_arguments), WithJsonSchema({"type": "string"})
    ] = "{}"


class CalledTool(Tolerant):
    """A call that the model made earlier in the chat."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Tolerant):
    """One message. `developer` is the same as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(to_text), WithJsonSchema(TEXT_OR_PARTS)] = ""
    name: str | None = None
    tool_calls: list[CalledTool] | None = Field(None, description="The calls of an assistant's message.")
    tool_call_id: str | None = Field(None, description="Which call a message of the role `tool` answers.")

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content is required")
        return self

    def to_turn(self) -> dict[str, Any]:
        """The message as a chat template expects it."""
        turn = self.model_dump(exclude_none=True)
        turn["content"] = self.content
        if not self.tool_calls:
            turn.pop("tool_calls", None)
        if self.role == "developer":
            turn["role"] = "system"
        return turn


class ChatCompletionBody(CompletionFields):
    """A chat to continue. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "SmolLM2-135M-Instruct",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_completion_tokens": 32,
            }
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = (
        Field(description="The chat. Contents are text, or lists of text parts.")
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The newer name of `max_tokens`."
    )
    logprobs: bool | None = Field(None, description="Return the log-probability of each output token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="With `logprobs`: also return this many of the most likely tokens."
    )
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: ToolChoiceField = Field(
        None, description="Whether the model calls a tool, and which. Default: `auto`."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further arguments of the chat template, such as `enable_thinking`."
    )
    reasoning_effort: str | None = Field(None, description="Passed to the chat template.")

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse(self.tools or [], self.tool_choice, self.parallel_tool_calls is not False)

    def to_task(self, on_disconnect: str) -> ChatTask:
        """The task of this chat. Raises `Problem` (400)."""
        self.refuse_unsupported()
        values = self.task_values()
        values["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "requires logprobs: true")
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        values["messages"] = [message.to_turn() for message in self.messages]
        values["chat_template_kwargs"] = template_kwargs(self.chat_template_kwargs, self.reasoning_effort)
        is_constrained = self.sampling.get("structured_outputs") is not None
        values |= self.tool_use.task_values(is_constrained=is_constrained)
        return to_task(ChatTask, {**values, "on_disconnect": on_disconnect})


def template_kwargs(given: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any] | None:
    """Further arguments of the chat template. Raises `Problem` (400)."""
    arguments = dict(given or {})
    for name in arguments.keys() & _TEMPLATE_ARGUMENTS:
        raise bad_field("chat_template_kwargs", f"{name} cannot be set")
    if reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", reasoning_effort)
    return arguments or None
