"""What the service answers, as immutable objects.

A field that a newer service adds is kept as an attribute. A value that is not known yet is None.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

ENDED = frozenset({"completed", "failed", "cancelled"})
"""The statuses of a task that has ended."""


class Reply(BaseModel):
    """Immutable, and open to fields of newer services."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def to_json(self) -> dict[str, Any]:
        """The fields as the service sent them."""
        return self.model_dump(mode="json", exclude_unset=True)


class Alternative(Reply):
    """One of the most likely tokens at a position."""

    id: int
    logprob: float
    token: str
    bytes: tuple[int, ...]


class TokenLogprobs(Reply):
    """Log-probability of a token by the model itself. `top`: the most likely tokens, in order."""

    logprob: float
    token: str
    bytes: tuple[int, ...]
    top: tuple[Alternative, ...] = ()


class PromptTokenLogprobs(TokenLogprobs):
    """The same for a token of the prompt."""

    id: int


class Output(Reply):
    """One output; partial while the task runs. `finish_reason`: stop, length, cancelled, timeout or error."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class QueuePosition(Reply):
    """The position of a waiting task: tasks and estimated tokens before it, seconds until it starts."""

    position: int | None = None
    tokens_ahead: int | None = None
    eta_seconds: float | None = None
    waiting_for: str | None = None


class Usage(Reply):
    """Tokens of the task so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class OutputLimit(Reply):
    """The maximum length of each output, and what determines it."""

    max_tokens: int
    requested: int | None = None
    bound_by: str


class Timings(Reply):
    """Seconds from the acceptance of the task until it was scheduled, had its first token, and ended."""

    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    total_seconds: float | None = None


class TaskProblem(Reply):
    """Why a task failed."""

    type: str = "server_error"
    code: str
    message: str
    param: str | None = None


class Urls(Reply):
    """Paths of the task on its server."""

    self: str
    events: str
    cancel: str


class WebhookState(Reply):
    """The delivery of the task's webhook. `state`: pending, delivered or failed (given up).

    `last_status`, `last_error`: of the last attempt. Times are in seconds since the epoch.
    """

    url: str
    state: str
    attempts: int = 0
    last_status: int | None = None
    last_error: str | None = None
    next_attempt_at: float | None = None
    ended_at: float | None = None


class TaskSummaryFields(Reply):
    """A task as a list shows it. `status`: queued, in_progress, completed, failed or cancelled.

    `created_at`: seconds since the epoch.
    """

    id: str
    object: str = "task"
    status: str
    created_at: float
    model: str
    priority: int
    usage: Usage | None = None
    timings: Timings = Timings()
    error: TaskProblem | None = None
    urls: Urls
    metadata: Mapping[str, Any] | None = None
    webhook: WebhookState | None = None
    request_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class TaskFields(TaskSummaryFields):
    """A task with its outputs so far. `request`: the body of the submission, if it was asked for."""

    queue: QueuePosition | None = None
    outputs: tuple[Output, ...] = ()
    prompt_logprobs: tuple[PromptTokenLogprobs | None, ...] | None = None
    output_limit: OutputLimit | None = None
    request: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The text of the first output so far."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each output so far."""
        return tuple(output.text for output in self.outputs)


_Item = TypeVar("_Item", bound=Reply)


class Page(Reply, Generic[_Item]):
    """A part of a list. `next`: where the next page starts, or None after the last one."""

    data: tuple[_Item, ...]
    has_more: bool = False
    next: str | None = None


class Model(Reply):
    """A model that the service serves."""

    id: str
    object: str = "model"
    created: int | None = None
    owned_by: str | None = None


class Models(Reply):
    """The reply of `GET /v1/models`."""

    data: tuple[Model, ...]


class Queue(Reply):
    """What waits and runs. `waiting_tokens`: estimated. `oldest_seconds`: how long the first one waits.

    `drain_tokens_per_second`: the rate of the last minute.
    """

    object: str = "queue"
    model: str
    waiting: int
    running: int
    waiting_by_priority: Mapping[str, int] = {}
    ready_workers: int = 0
    waiting_tokens: int = 0
    oldest_seconds: float | None = None
    drain_tokens_per_second: float | None = None


class Worker(Reply):
    """A worker, as it reports itself. `state`: loading, ready, draining, stalled, or a newer one."""

    name: str
    model: str
    state: str
    detail: str = ""
    started_at: float | None = None
    running: int = 0
    waiting: int = 0
    max_num_seqs: int | None = None


class Workers(Reply):
    """The reply of `GET /v1/workers`."""

    data: tuple[Worker, ...]
