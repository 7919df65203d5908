"""A task that has a chat with tools. Only the OpenAI-compatible routes create one."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from api.schemas.requests import Message, TaskBody


class ChatTurn(Message):
    """A message as chat templates expect it."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    role: Literal["system", "user", "assistant", "tool"]  # type: ignore[assignment]  # one more than a task's
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatTask(TaskBody):
    """A task whose prompt is a chat. `tools`: the functions that the chat template describes. `tool_use`: how
    `/v1/responses` reads their calls from the text.
    """

    messages: list[ChatTurn] | None = Field(None)  # type: ignore[assignment]
    tools: list[dict[str, Any]] | None = None
    tool_use: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chat_fields(self) -> dict[str, Any]:
        fields = {
            "tools": tuple(self.tools) if self.tools else None,
            "tool_use": self.tool_use,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return {name: value for name, value in fields.items() if value is not None}
