"""Response bodies, as OpenAPI shows them. A value that is not known yet is null."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class QueuePosition(BaseModel):
    """The position of a waiting task."""

    position: int | None = Field(description="Number of tasks before it.")
    tokens_ahead: int | None = Field(description="Estimated tokens of the tasks before it.")
    eta_seconds: float | None = Field(
        description="Estimated seconds until it starts, from the rate of the last minute. Null while no "
        "worker is ready."
    )
    waiting_for: str | None = Field(
        description="In the queue: `worker`, `capacity` or `behind` (other tasks are first). In a worker: "
        "the reason of its scheduler. `suspect`: a worker may have crashed because of the task, so it waits "
        "to run alone."
    )


class Alternative(BaseModel):
    """One of the most likely tokens at a position."""

    id: int
    logprob: float = Field(description="Natural logarithm of the probability. -9999 means minus infinity.")
    token: str = Field(description="Text of the token. Bytes that are no complete character become U+FFFD.")
    bytes: list[int] = Field(description="Bytes of the token. They differ even if the texts are equal.")


class TokenLogprobsView(BaseModel):
    """Log-probability of a token by the model itself, before penalties and temperature."""

    logprob: float
    token: str
    bytes: list[int]
    top: list[Alternative] = Field(description="The most likely tokens, in order.")


class PromptLogprobsView(TokenLogprobsView):
    """The same for a token of the prompt."""

    id: int


class Output(BaseModel):
    """One output; partial while the task runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "cancelled", "timeout", "error"] | None
    logprobs: list[TokenLogprobsView] | None = Field(
        description="One for each of `token_ids`. Null if not requested."
    )


class UsageView(BaseModel):
    """Tokens of the task so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class OutputLimitView(BaseModel):
    """The maximum length of each output, and what determines it."""

    max_tokens: int = Field(description="An output of this many tokens ends as `length`.")
    requested: int | None = Field(description="`max_tokens` of the request.")
    bound_by: str = Field(
        description="`max_tokens`: the request; `generation_config`: the model's default; `model_length`: "
        "the model's length minus the prompt; `output_size`: the maximum size of one task's results."
    )


class Timings(BaseModel):
    """Seconds from the acceptance of the task to its stages. Null for a stage not reached yet."""

    queue_seconds: float | None = Field(description="Until it was first scheduled.")
    ttft_seconds: float | None = Field(description="Until its first token.")
    total_seconds: float | None = Field(description="Until it ended.")


class ErrorView(BaseModel):
    """The error object of the OpenAI API."""

    type: str
    code: str
    message: str
    param: str | None


class Urls(BaseModel):
    """Paths of the task on this server."""

    self: str
    events: str
    cancel: str


class WebhookDeliveryView(BaseModel):
    """The delivery of a task's webhook, which begins when the task has ended."""

    url: str = Field(description="Without credentials and query.")
    state: Literal["pending", "delivered", "failed"] = Field(
        description="`failed`: given up after the last attempt."
    )
    attempts: int = Field(description="Attempts that have ended.")
    last_status: int | None = Field(description="Of the last reply. Null without one.")
    last_error: str | None = Field(description="Why the last attempt failed.")
    next_attempt_at: float | None = Field(description="Seconds since the epoch. Null if none is scheduled.")
    ended_at: float | None = Field(description="When it was delivered or given up.")


TaskStatusName = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


class TaskSummary(BaseModel):
    """A task as lists show it: without its outputs and its position in the queue."""

    id: str
    object: Literal["task"] = "task"
    status: TaskStatusName
    created_at: float = Field(description="Seconds since the epoch.")
    model: str
    priority: int
    usage: UsageView | None = Field(
        description="Null until the length of the prompt is known. Until the task ends, `completion_tokens` "
        "counts the events of its log."
    )
    timings: Timings
    error: ErrorView | None
    urls: Urls
    metadata: dict[str, Any] | None
    request_id: str | None = Field(
        description="`X-Request-ID` of the call that submitted it, in the logs and in its webhook too."
    )
    webhook: WebhookDeliveryView | None = Field(description="Null without a webhook.")


class TaskList(BaseModel):
    """A part of the tasks of a tenant, newest first."""

    object: Literal["list"] = "list"
    data: list[TaskSummary]
    has_more: bool = Field(
        description="Whether older tasks may follow. A part may hold fewer than `limit` tasks, or none, and "
        "not be the last: a call looks at a bounded number of tasks."
    )
    next: str | None = Field(description="The value of `after` for the next part. Null after the last one.")


class Queue(BaseModel):
    """What waits and what runs, of all tenants."""

    object: Literal["queue"] = "queue"
    model: str
    waiting: int = Field(description="Tasks that no worker has claimed.")
    waiting_by_priority: dict[str, int]
    waiting_tokens: int = Field(description="Their estimated tokens, prompts and outputs.")
    oldest_seconds: float | None = Field(description="How long the oldest of them waits. Null without one.")
    running: int = Field(description="Tasks that workers have claimed and not ended.")
    ready_workers: int
    drain_tokens_per_second: float | None = Field(
        description="Estimated tokens that the workers process per second while tasks wait, in the last "
        "minute. Null until measured."
    )


class Task(BaseModel):
    """A task with its outputs so far."""

    id: str
    object: Literal["task"] = "task"
    status: TaskStatusName
    created_at: float = Field(description="Seconds since the epoch.")
    model: str
    priority: int
    queue: QueuePosition | None = Field(description="Null while the task runs and after it has ended.")
    outputs: list[Output] = Field(description="`n` outputs, ordered by index.")
    prompt_logprobs: list[PromptLogprobsView | None] | None = Field(
        description="One for each token of the prompt; null for the first. Null if not requested."
    )
    usage: UsageView | None = Field(description="Null until the length of the prompt is known.")
    output_limit: OutputLimitView | None = Field(
        description="May be lower than `max_tokens` of the request. Null until a worker accepts the task."
    )
    timings: Timings
    error: ErrorView | None
    urls: Urls
    metadata: dict[str, Any] | None
    request_id: str | None = Field(
        description="`X-Request-ID` of the call that submitted it, in the logs and in its webhook too."
    )
    webhook: WebhookDeliveryView | None = Field(description="Null without a webhook.")
    request: dict[str, Any] | None = Field(
        description="The prompt and the parameters as submitted. Only with `include=prompt`."
    )


class ProblemView(BaseModel):
    """An error: problem details (RFC 9457) with the `error` object of the OpenAI API."""

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
"""The OpenAPI response `default` of an operation."""


class WorkerView(BaseModel):
    """State of a worker, as it reports it."""

    name: str
    model: str
    state: str = Field(
        description="`loading`, `ready`, `draining`, `stalled`, or a state that a newer worker reports."
    )
    detail: str = Field(description="Progress of loading.")
    started_at: float
    running: int
    waiting: int
    max_num_seqs: int


class WorkerList(BaseModel):
    """The workers of this service's model."""

    object: Literal["list"] = "list"
    data: list[WorkerView]


class Readiness(BaseModel):
    """A worker is ready to run tasks."""

    state: Literal["ready"]
    model: str
    workers: list[WorkerView]
    warnings: list[str] = []


class Liveness(BaseModel):
    """This process answers."""

    state: Literal["alive"] = "alive"
