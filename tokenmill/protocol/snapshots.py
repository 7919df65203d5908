"""What a task is like at one moment, and how the store's replies become values. Pure functions.

Knows the shape of the scripts' replies (bytes, as RESP gives them), not how they are asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from tokenmill.protocol.messages import LogEntry
from tokenmill.protocol.naming import DEFAULT_TENANT, PRIORITIES
from tokenmill.protocol.records import QueueStats, TaskStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnapshot:
    """All that Redis knows of a task at the time `now`. Times are epoch seconds on Redis's clock.

    `claimed`: a worker owns it. `position`: tasks before it, and `tokens_ahead`: their estimated tokens.
    While it waits in Redis these are exact with one tenant, and estimated while several wait, as
    `standing.lua` says; only the next to be claimed has position 0. After the claim they are as the worker
    says. `waiting_for`: `worker`, `capacity` or `behind` in Redis, the scheduler's reason after the claim, or
    `suspect`: a worker may have died of it, and it waits to be tried alone. `drain_rate`: estimated tokens
    per second that the workers get done while tasks wait, None until measured. `num_entries`: length of the
    log. `cancel_on_disconnect`, `tenant`: as submitted. `output_limit`: JSON of `sizes.OutputLimit`, once a
    worker knows the prompt's length.
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


class Reading(NamedTuple):
    """A task with the messages of its log, both of the same moment."""

    snapshot: TaskSnapshot
    entries: tuple[LogEntry, ...]


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """`[name, value, name, value, ...]` as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def to_snapshot(task_id: str, reply: Sequence[Any]) -> TaskSnapshot:
    """From the reply of `inspect`."""
    run_hash, num_entries, now, position, tokens_ahead, drain_rate, num_ready_workers = reply
    run = {name.decode(): value.decode() for name, value in pairs(run_hash).items() if value}
    num_ready = int(num_ready_workers)
    return TaskSnapshot(
        task_id=task_id,
        status=_status(run),
        model=run["model"],
        metadata=run["metadata"],
        priority=int(run["priority"]),
        accepted_at=int(run["accepted_us"]) / 1e6,
        scheduled_at=_float(run.get("scheduled_at")),
        first_token_at=_float(run.get("first_token_at")),
        finished_at=_float(run.get("finished_at")),
        now=float(now),
        claimed="owner" in run,
        position=_int(run.get("position") if position is None else position),
        tokens_ahead=_int(run.get("tokens_ahead") if tokens_ahead is None else tokens_ahead),
        waiting_for=run.get("waiting_for") if position is None else _waiting_for(position, num_ready),
        drain_rate=_float(drain_rate),
        num_ready_workers=num_ready,
        prompt_tokens=_int(run.get("prompt_tokens")),
        cached_tokens=int(run.get("cached_tokens", "0")),
        num_entries=num_entries,
        attempt=int(run.get("attempt", "0")),
        num_outputs=int(run.get("n", "1")),
        cancel_on_disconnect=run.get("on_disconnect") == "cancel",
        tenant=run["tenant"],
        output_limit=run.get("output_limit"),
    )


def to_queue_stats(reply: Sequence[Any]) -> QueueStats:
    """From the reply of `queue_stats`."""
    classes, oldest, cost, claimed, now, drain_rate, num_ready_workers, totals, ready, later = reply
    waiting = dict.fromkeys(PRIORITIES, 0)
    for priority, count in zip(classes[::2], classes[1::2], strict=True):
        waiting[int(priority)] = waiting.get(int(priority), 0) + int(count)
    return QueueStats(
        waiting=waiting,
        oldest_age=0.0 if oldest is None else max(0.0, float(now) - float(oldest)),
        waiting_cost=int(cost),
        claimed=int(claimed),
        drain_rate=_float(drain_rate),
        num_ready_workers=int(num_ready_workers),
        totals={name.decode(): int(value) for name, value in pairs(totals).items()},
        webhooks_due=int(ready),
        webhooks_later=int(later),
    )


def _status(run: Mapping[str, str]) -> TaskStatus:
    if terminal := run.get("terminal"):
        return cast("TaskStatus", terminal)
    return "in_progress" if "scheduled_at" in run else "queued"


def _waiting_for(position: int, num_ready_workers: int) -> str:
    if not num_ready_workers:
        return "worker"
    return "behind" if position else "capacity"


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
