"""What the store returns about tasks and queues: consistent states of one moment.

Times are seconds since the epoch on Redis's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tokenmill.protocol.messages import LogEntry
from tokenmill.protocol.naming import DEFAULT_TENANT

TaskStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnapshot:
    """All that Redis holds about a task, except its log, at the time `now`.

    `claimed`: a worker owns it. `position`, `tokens_ahead`: tasks before it and their estimated tokens; exact
    with one waiting tenant, estimated with several (see `queue_positions.lua`), reported by the worker after
    the claim. Only the next task to be claimed has position 0. `waiting_for`: before the claim `worker`,
    `capacity` or `behind`; after it the scheduler's reason, or `suspect`: the task may have crashed a worker
    and waits to run isolated. `drain_rate`: estimated tokens per second that the workers process while tasks
    wait; None until measured. `num_entries`: length of the log. `output_limit`: JSON of
    `limits.OutputLimit`, once a worker has tokenized the prompt. `request_id`: of the call that submitted it.
    """

    task_id: str
    status: TaskStatus
    model: str
    metadata: str
    priority: int
    accepted_at: float
    scheduled_at: float | None
    first_token_at: float | None
    finished_at: float | None
    now: float
    claimed: bool
    position: int | None
    tokens_ahead: int | None
    waiting_for: str | None
    drain_rate: float | None
    num_ready_workers: int
    prompt_tokens: int | None
    cached_tokens: int
    num_entries: int
    attempt: int
    num_outputs: int = 1
    cancel_on_disconnect: bool = False
    tenant: str = DEFAULT_TENANT
    output_limit: str | None = None
    webhook: "WebhookDelivery | None" = None
    request_id: str | None = None

    @property
    def accepted_us(self) -> int:
        """The acceptance in microseconds, exactly."""
        return round(self.accepted_at * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDelivery:
    """The delivery of a task's webhook.

    `attempts`: those that have ended. `last_status`, `last_error`: of the last one; None without a reply or
    an error. `next_attempt_at`: None if none is scheduled. `ended_at`: when it was delivered or given up.
    """

    url: str
    state: Literal["pending", "delivered", "failed"]
    attempts: int = 0
    last_status: int | None = None
    last_error: str | None = None
    next_attempt_at: float | None = None
    ended_at: float | None = None


class ListedTask(NamedTuple):
    """A task in a list: its state, without its position in the queue, and the last entry of its log."""

    snapshot: "TaskSnapshot"
    last_entry: LogEntry | None


class TaskPage(NamedTuple):
    """A part of a list of tasks. `next`: the cursor of the next part; None if this is the last one."""

    tasks: list[ListedTask]
    next: "ListCursor | None"


class ListCursor(NamedTuple):
    """A position in a list of tasks, newest first: acceptance (microseconds) and id of the last task."""

    accepted_us: str
    task_id: str


class Reading(NamedTuple):
    """A task with its log, both of the same moment."""

    snapshot: TaskSnapshot
    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The queues of one model.

    `waiting`: tasks by priority class, for every class. `oldest_age`: seconds since the acceptance of the
    oldest waiting task, 0 without one. `waiting_cost`: estimated tokens. `claimed`: tasks that workers own.
    `drain_rate`: estimated tokens per second that the workers process while tasks wait; None until measured.
    `totals`: monotonic counters `submitted`, `finished:<reason>`, `client_errors`, `prompt_tokens`,
    `completion_tokens`. `webhooks_due`, `webhooks_later`: webhooks of all models to be delivered now, and to
    be retried later.
    """

    waiting: Mapping[int, int]
    oldest_age: float
    waiting_cost: int
    claimed: int
    drain_rate: float | None
    num_ready_workers: int
    totals: Mapping[str, int]
    webhooks_due: int = 0
    webhooks_later: int = 0
