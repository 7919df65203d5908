"""The frozen values that the task store takes and returns.

Times are seconds since the epoch on Redis's clock.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from tokenmill.protocol.limits import NO_LIMITS, TimeLimits
from tokenmill.protocol.messages import LogEntry

JOB_ID = re.compile(r"[A-Za-z0-9_-]+")
"""Job ids that RQ accepts; they are also safe in keys and in JSON strings."""

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
"""The fields that an owner may set with a `Write`. An empty string clears a field."""

WorkerState = Literal["loading", "ready", "draining", "stalled"]

TaskPhase = Literal["untouched", "waiting", "seated", "alone"]
"""What the owner of a task is doing with it; stored in the field `standing`.

`untouched`: nothing yet. `waiting`: it waits to be scheduled. `seated`: it is being prepared, or steps run
it. `alone`: it runs isolated, while every other task of the worker is `untouched`.
"""


class QueueFull(Exception):
    """A limit of waiting tasks or tokens was met, so nothing was stored.

    `limit_met`: which limit. `limit_of`: the limit of all tenants together, or this tenant's share of it.
    `depth`, `tokens`: waiting tasks of the model and their estimated tokens. `tenant_depth`, `tenant_tokens`:
    those of the tenant.
    """

    def __init__(
        self,
        *,
        limit_met: Literal["tasks", "tokens"],
        limit_of: Literal["all", "tenant"],
        depth: int,
        tokens: int,
        tenant_depth: int,
        tenant_tokens: int,
    ) -> None:
        super().__init__(f"{depth} tasks with {tokens} tokens wait: limit of {limit_met} ({limit_of}) met")
        self.limit_met = limit_met
        self.limit_of = limit_of
        self.depth = depth
        self.tokens = tokens
        self.tenant_depth = tenant_depth
        self.tenant_tokens = tenant_tokens


class IdempotencyConflict(Exception):
    """The idempotency key was used before with another body, so nothing was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A task to be queued.

    `job_fields`: RQ's `Job.to_dict()`. `cost`: estimated tokens of prompt and outputs. `metadata`: JSON text.
    `body_digest` distinguishes the bodies sent with one `idempotency_key`. `max_waiting`,
    `max_waiting_tokens`: limits of the model's waiting tasks and of their cost; None means no limit. The
    first waiting task is never too large for the token limit. `share_limits`: a tenant may use no more of
    each limit than all tenants together leave free; its first waiting task is never too large. `webhook`:
    URL that receives the end of the task, or "". `cancel_on_disconnect`: the task is cancelled when its last
    reader disconnects. `request_id`: of the call that submitted it, for logs and webhooks.

    Raises ValueError for a value that is not valid in a key or a message.
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
    request_id: str = ""

    def __post_init__(self) -> None:
        if not JOB_ID.fullmatch(self.task_id):
            raise ValueError(f"task_id: letters, digits, _ and - only, not {self.task_id!r}")
        if not self.queue.startswith(f"tm:{self.slug}:{self.priority}:"):
            raise ValueError(f"queue: must belong to this model and priority, not {self.queue!r}")
        if self.num_outputs < 1:
            raise ValueError(f"num_outputs: 1 or more, not {self.num_outputs}")
        if self.cost < 0:
            raise ValueError(f"cost: 0 or more tokens, not {self.cost}")
        if "data" not in self.job_fields:
            raise ValueError("job_fields: must have the field `data` of RQ's Job.to_dict()")


@dataclass(frozen=True, slots=True)
class Submitted:
    """`replayed`: the task already existed, from an earlier submission of the same key or id."""

    task_id: str
    replayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A task that a worker owns until its lease lapses and another worker claims it.

    `owner`: random id of this attempt. `data`: RQ's job data, zlib of JSON `[function, null, args, kwargs]`.
    `waited_seconds`: from the acceptance to this claim. `num_entries`: length of the log that earlier
    attempts published; `entries`: that log, once read. `prompt_token_ids`, `fingerprint`,
    `sampling_defaults` (JSON or ""): as the first attempt stored them. `has_started`: an earlier attempt ran
    it in a step. `cached_tokens`: as an earlier attempt reported them. `suspect`: an earlier owner died while
    working on it and logged nothing of it, so it must run isolated until its log grows.
    `request_id`: of the call that submitted it. `claimed_at`: by the worker's monotonic clock; the worker
    sets it.
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
    tenant: str = ""
    request_id: str = ""
    claimed_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a task ended; sent with the write that has its last entry.

    `reason`: `stop`, `length`, `timeout` or `error`; the worst of several outputs. `result`: JSON text for
    RQ's `return_value()`, partial for a failed task. `error_text`: what RQ shows as the exception of a failed
    task. `is_client_error`: the request was invalid, and its client can correct it.
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
    """What an owner adds to one task: log entries, facts, and finally its settlement.

    `first_seq`: the `seq` of `entries[0]`. `facts`: values by names of `FACTS`. The fact `scheduled`, the
    seconds since a step first ran the task, is stored as a time and clears the reasons for waiting. Raises
    ValueError for an unknown fact.
    """

    task_id: str
    owner: str
    first_seq: int = 0
    entries: tuple[LogEntry, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    settlement: Settlement | None = None

    def __post_init__(self) -> None:
        if not self.facts.keys() <= FACTS:
            raise ValueError(f"facts: unknown names: {', '.join(sorted(self.facts.keys() - FACTS))}")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The write is stored, now or by an earlier call whose reply was lost."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was stored: the writer no longer owns the task (claimed by another, handed back, deleted)."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nothing was stored: the task was cancelled under this owner, and its end is published."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing was stored: the log is shorter than `first_seq`. Send again from seq `length`."""

    length: int


Outcome = Accepted | Lost | Cancelled | Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Tasks that were not renewed: no longer owned, or cancelled under this owner."""

    lost: frozenset[str] = frozenset()
    cancelled: frozenset[str] = frozenset()


class ReapFailure(NamedTuple):
    """A record that a duty of the reaper could not process, and why. It is retried later."""

    duty: str
    record: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Task ids by what became of them.

    `returned`: back in their queues. `timed_out`: ended as `timeout`. `cancelled`: by RQ's own tools, or as
    their readers lapsed. `poisoned`: failed, as they ended several workers. `lost`: failed, as Redis lost
    keys of them.
    """

    returned: tuple[str, ...] = ()
    timed_out: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    poisoned: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    failures: tuple[ReapFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What a worker process reports. `running`, `waiting`: sequences in its scheduler."""

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
        return cls(**_known_members(cls, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Limits of a served model, published by its worker so that the API can check requests.

    Lengths in tokens. `max_prompt_tokens`: the longest prompt that this deployment accepts; less than
    `max_model_len`, or than the KV pool or the token budget. `max_prompt_bytes`: bytes of UTF-8 that a prompt
    of that length can have at most; None if the tokenizer sets no bound. `default_sampling`: sampling fields
    of the model's `generation_config.json`, used where a request has none. `tool_format`: how the model
    writes tool calls, see `api/tool_calls/formats.py`.
    """

    model: str
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    has_chat_template: bool
    fingerprint: str
    max_prompt_bytes: int | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str = "hermes"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ModelCard":
        return cls(**_known_members(cls, text))


def _known_members(record: type[WorkerRecord] | type[ModelCard], text: str | bytes) -> dict[str, Any]:
    """The members of a JSON object that `record` has; those of a newer version are left out."""
    known = {one.name for one in fields(record)}
    return {name: value for name, value in json.loads(text).items() if name in known}
