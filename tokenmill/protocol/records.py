"""The frozen values that go into and come out of the task store. Knows neither Redis nor RQ.

Times are seconds since the epoch on Redis's clock.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, NamedTuple

from tokenmill.protocol.messages import LogEntry
from tokenmill.protocol.time_limits import NO_LIMITS, TimeLimits

JOB_ID = re.compile(r"[A-Za-z0-9_-]+")
"""What RQ takes as the id of a job; also safe in a key and in a JSON string."""

FACTS = frozenset(
    {
        "scheduled",
        "waiting_for",
        "tokens_ahead",
        "position",
        "prompt_ids",
        "prompt_tokens",
        "fingerprint",
        "sampling_defaults",
        "output_limit",
        "cached_tokens",
    }
)
"""What a worker may tell of a task that it owns. An empty string takes a fact back."""

TaskStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
WorkerState = Literal["loading", "ready", "draining", "stalled"]
TaskPhase = Literal["untouched", "waiting", "seated", "alone"]
"""How a task stands in the worker that owns it: nothing is done with it, for sure; it waits for a step to
take it; steps take it, or it is being prepared; so it is alone, while the others are untouched."""


class QueueFull(Exception):
    """The model, or one tenant of it, has as many waiting tasks or tokens as it may have: nothing was stored.

    `limit_met`: which of the two limits; `whose`: that of all tenants together, or this tenant's share of it.
    `depth`: waiting tasks of the model; `tokens`: their estimated tokens. `own_depth`, `own_tokens`: those of
    the tenant.
    """

    def __init__(
        self,
        *,
        limit_met: Literal["tasks", "tokens"],
        whose: Literal["all", "tenant"],
        depth: int,
        tokens: int,
        own_depth: int,
        own_tokens: int,
    ) -> None:
        super().__init__(f"{depth} tasks of {tokens} tokens wait, the limit of {limit_met} of {whose} is met")
        self.limit_met = limit_met
        self.whose = whose
        self.depth = depth
        self.tokens = tokens
        self.own_depth = own_depth
        self.own_tokens = own_tokens


class IdempotencyConflict(Exception):
    """The idempotency key was used before with another body: nothing was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One task to be queued.

    `job_fields`: RQ's `Job.to_dict()`. `cost`: estimated tokens, prompt and output together. `metadata`:
    JSON text, given back as it is. `body_digest` tells the bodies of one `idempotency_key` apart.
    `max_waiting`, `max_waiting_tokens`: limits of this model's waiting tasks and of their cost; None means
    none. A task that would wait alone is never too large for the second. `share_limits`: a tenant may have as
    much waiting as the limits leave free, so that none takes all; its first task is never too large.
    `num_outputs`: texts that the task
    gives. `limits`: the time limits that it sets for itself. `webhook`: the URL that is told of its end, ""
    for none. `cancel_on_disconnect`: it ends as cancelled when its last reader goes away.
    Raises ValueError where a value cannot stand in a key or a message.
    """

    task_id: str
    queue: str
    slug: str
    model: str
    priority: int
    tenant: str
    job_fields: Mapping[str, str | bytes | int | float]
    cost: int
    metadata: str = "null"
    idempotency_key: str | None = None
    body_digest: str = ""
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    share_limits: bool = False
    num_outputs: int = 1
    limits: TimeLimits = NO_LIMITS
    webhook: str = ""
    cancel_on_disconnect: bool = False

    def __post_init__(self) -> None:
        if not JOB_ID.fullmatch(self.task_id):
            raise ValueError(f"task_id: letters, digits, _ and - only, not {self.task_id!r}")
        if not self.queue.startswith(f"tm:{self.slug}:{self.priority}:"):
            raise ValueError(f"queue: the one of this model and priority, not {self.queue!r}")
        if self.num_outputs < 1:
            raise ValueError(f"num_outputs: 1 or more, not {self.num_outputs}")
        if self.cost < 0:
            raise ValueError(f"cost: tokens, 0 or more, not {self.cost}")
        if "data" not in self.job_fields:
            raise ValueError("job_fields: RQ's Job.to_dict() has a field `data`")


@dataclass(frozen=True, slots=True)
class Submitted:
    """`replayed`: the task was there already, from an earlier submission of the same key or the same id."""

    task_id: str
    replayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A task that this worker owns now, until its lease lapses and somebody else takes it.

    `data`: the RQ job's `data`, zlib of JSON `[function name, null, args, kwargs]`. `num_entries`: length of
    the log that earlier attempts published; `entries`: that log, once it has been read. `prompt_token_ids`
    and `fingerprint`: as the first attempt stored them; so are `sampling_defaults`, JSON or "", which hold
    for this task whatever this worker's are. `waited_seconds`: from the acceptance to this claim, on
    Redis's clock. `num_outputs`: as submitted. `has_started`: a step of an earlier attempt took it.
    `cached_tokens`: as an earlier attempt told them. `suspect`: an earlier owner died while it had this
    task in hand and had logged nothing of it. It is to be tried alone, and recorded so before anything else
    is done with it, until its log has grown.
    """

    task_id: str
    owner: str
    attempt: int
    queue: str
    priority: int
    accepted_at: float
    data: bytes
    waited_seconds: float = 0.0
    num_entries: int = 0
    entries: tuple[LogEntry, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    fingerprint: str | None = None
    sampling_defaults: str = ""
    num_outputs: int = 1
    has_started: bool = False
    cached_tokens: int = 0
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a task ended. Goes with the write that carries its terminal entry.

    `reason`: `stop`, `length`, `timeout` or `error`; of several outputs the worst. `result`: JSON text, what
    RQ's `return_value()` gives, partial for failed ones. `error_text`: what RQ shows as the exception of a
    failed one. `is_client_error`: the request itself was wrong, and its client can correct it.
    """

    status: Literal["completed", "failed"]
    reason: str
    result: str
    error_text: str = ""
    is_client_error: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """What an owner adds to one task: messages, facts, and at last its settlement.

    `first_seq`: the `seq` of `entries[0]`. `facts`: names from `FACTS`; `scheduled`, how many seconds ago a
    step first took the task, is stored as a time and takes back why and behind whom it waited. Raises
    ValueError for another name.
    """

    task_id: str
    owner: str
    first_seq: int = 0
    entries: tuple[LogEntry, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    settlement: Settlement | None = None

    def __post_init__(self) -> None:
        if not self.facts.keys() <= FACTS:
            raise ValueError(f"facts: no such name: {', '.join(sorted(self.facts.keys() - FACTS))}")


@dataclass(frozen=True, slots=True)
class Accepted:
    """All of the write is stored, now or by an earlier call whose reply was lost."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Not the owner any more (taken over, handed back, deleted): nothing was stored. Drop the sequence."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task was cancelled in this owner's hands: nothing was stored, and its end is told already."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The log is shorter than `first_seq`: nothing was stored. Send again from seq `length`."""

    length: int


Outcome = Accepted | Lost | Cancelled | Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Tasks that were not renewed: another's or nobody's by now, or cancelled in this owner's hands."""

    lost: frozenset[str] = frozenset()
    cancelled: frozenset[str] = frozenset()


class ReapFailure(NamedTuple):
    """A record that a duty of the reaper could not treat, and why. It is treated again later."""

    duty: str
    record: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Task ids: put back into their queues, ended as `timeout`, as `cancelled`, and as `error`.

    Those that are cancelled were so by RQ's own tools, or all of their readers have lapsed. The poisoned are
    to blame for the deaths of several workers. Of the lost ones Redis had lost keys.
    """

    returned: tuple[str, ...] = ()
    timed_out: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    poisoned: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    failures: tuple[ReapFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What a worker process says of itself. `running`, `waiting`: sequences in its scheduler."""

    name: str
    model: str
    slug: str
    state: WorkerState
    started_at: float
    detail: str = ""
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "WorkerRecord":
        """Of a newer version too: members that this one does not know are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """One model's queues at one moment.

    `waiting`: priority class -> tasks, every class named. `oldest_age`: seconds since the acceptance of the
    oldest waiting task, 0 without one. `waiting_cost`: estimated tokens. `claimed`: tasks that workers own.
    `drain_rate`: estimated tokens per second that the workers get done while tasks wait; None until measured.
    `totals`: counters that only grow: `submitted`, `finished:<reason>`, `client_errors`, `prompt_tokens`,
    `completion_tokens`.
    `webhooks_due`, `webhooks_later`: to be delivered now, and tried again later; those of all models.
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
