"""What goes out, as OpenAPI shows it. What cannot be known yet is null, never a guess."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class QueuePlace(BaseModel):
    """Where a waiting task stands; numbers that nobody can know yet are null."""

    position: int | None = Field(description="Tasks that go before it.")
    tokens_ahead: int | None = Field(description="Estimated tokens of the tasks before it.")
    eta_seconds: float | None = Field(
        description="Until it starts, from the last minute's rate; null while no worker is ready."
    )
    waiting_for: str | None = Field(
        description="`worker`, `capacity` or `behind` in the queue, then the scheduler's reason; "
        "`suspect` if a worker may have died of it, so that it waits to be tried alone."
    )


class Alternative(BaseModel):
    """One of the likeliest tokens of a place."""

    id: int
    logprob: float = Field(description="Natural logarithm; -9999 stands for minus infinity.")
    token: str = Field(description="Its text; what is no whole character is U+FFFD.")
    bytes: list[int] = Field(description="Its bytes, which tell tokens apart whose texts are the same.")


class TokenLogprobsView(BaseModel):
    """How likely a token was to the model itself, before penalties and temperature."""

    logprob: float
    token: str
    bytes: list[int]
    top: list[Alternative] = Field(description="The likeliest tokens, in order.")


class PromptLogprobsView(TokenLogprobsView):
    """The same of a token of the prompt."""

    id: int


class Output(BaseModel):
    """One text; partial while the task runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "cancelled", "timeout", "error"] | None
    logprobs: list[TokenLogprobsView] | None = Field(
        description="One for each of `token_ids`; null where not asked for."
    )


class UsageView(BaseModel):
    """Tokens of the task so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class OutputLimitView(BaseModel):
    """The most tokens that each output gets, and why."""

    max_tokens: int = Field(description="An output ends as `length` there.")
    requested: int | None = Field(description="`max_tokens` as the request gave it.")
    bound_by: str = Field(
        description="`max_tokens`: the request's own; `generation_config`: the model's default; "
        "`model_length`: the room that the prompt leaves; `output_size`: the most that one task may tell."
    )


class Timings(BaseModel):
    """Seconds since the task was accepted; null until it got there."""

    queue_seconds: float | None = Field(description="When it was first scheduled.")
    ttft_seconds: float | None = Field(description="When its first token came.")
    total_seconds: float | None = Field(description="When it ended.")


class ErrorView(BaseModel):
    """What went wrong, as OpenAI's clients read it."""

    type: str
    code: str
    message: str
    param: str | None


class Urls(BaseModel):
    """Paths of the task on this server."""

    self: str
    events: str
    cancel: str


class Task(BaseModel):
    """One request and all that came of it so far."""

    id: str
    object: Literal["task"] = "task"
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"]
    created_at: float = Field(description="Seconds since the epoch.")
    model: str
    priority: int
    queue: QueuePlace | None = Field(description="Null while the task runs, and once it has ended.")
    outputs: list[Output] = Field(description="One, or `n`, by index.")
    prompt_logprobs: list[PromptLogprobsView | None] | None = Field(
        description="One for each token of the prompt, null for the first; null where not asked for."
    )
    usage: UsageView | None = Field(description="Null until the prompt's length is known.")
    output_limit: OutputLimitView | None = Field(
        description="Below `max_tokens` where there is less room. Null until a worker takes it."
    )
    timings: Timings
    error: ErrorView | None
    urls: Urls
    metadata: dict[str, Any] | None


class ProblemView(BaseModel):
    """Any error: problem details (RFC 9457) with OpenAI's `error` object inside."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    error: ErrorView


PROBLEM_REPLY: dict[str, Any] = {
    "description": "Any error, as problem details.",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemView"}}},
}
"""How OpenAPI describes the errors of an operation, under `default`."""


class WorkerView(BaseModel):
    """What a worker says of itself."""

    name: str
    model: str
    state: str = Field(
        description="`loading`, `ready`, `draining`, `stalled`, or a word of a worker of a later version."
    )
    detail: str = Field(description="While it loads: how far it is.")
    started_at: float
    running: int
    waiting: int
    max_num_seqs: int


class Readiness(BaseModel):
    """Whether a task that is submitted now would be worked on."""

    state: Literal["ready"]
    model: str
    workers: list[WorkerView]
    warnings: list[str] = []


class Liveness(BaseModel):
    """This process answers."""

    state: Literal["alive"] = "alive"
