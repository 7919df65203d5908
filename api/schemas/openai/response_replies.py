"""The replies of `/v1/responses`, as OpenAPI shows them."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseView(BaseModel):
    """A response, with its output so far."""

    id: str = Field(description="`resp_` and the id of its task.")
    object: Literal["response"]
    created_at: int = Field(description="Seconds since the epoch.")
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = Field(description="Whether it continues when its client disconnects.")
    output: list[dict[str, Any]] = Field(description="Items of type `message` or `function_call`.")
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None = Field(description="Null until it has ended.")


class InputItemList(BaseModel):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """A response that is deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
