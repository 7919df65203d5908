"""Converts replies of the scripts (bytes and integers, as RESP has them) to records and snapshots."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from tokenmill.protocol.messages import LogEntry, ProtocolError
from tokenmill.protocol.naming import PRIORITIES
from tokenmill.protocol.records import (
    Accepted,
    Cancelled,
    Claimed,
    Gap,
    Lost,
    Outcome,
    QueueFull,
    ReapFailure,
    Write,
)
from tokenmill.protocol.snapshots import ListedTask, QueueStats, TaskSnapshot, TaskStatus, WebhookDelivery

logger = logging.getLogger(__name__)

_OUTCOMES: Mapping[int, Outcome] = {-1: Accepted(), -2: Lost(), -3: Cancelled()}
"""The codes of `publish.lua`; any other number is the length of a log."""


def named(flat: Sequence[Any]) -> dict[str, Any]:
    """`[name, value, name, value, ...]` as a dict."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def texts(items: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(item.decode(errors="replace") for item in items)


def to_queue_full(reply: Sequence[Any]) -> QueueFull:
    """From the details of a refused `submit`."""
    limit_met, depth, tokens, limit_of, tenant_depth, tenant_tokens = reply
    return QueueFull(
        limit_met=cast("Literal['tasks', 'tokens']", limit_met.decode()),
        limit_of=cast("Literal['all', 'tenant']", limit_of.decode()),
        depth=depth,
        tokens=int(tokens),
        tenant_depth=tenant_depth,
        tenant_tokens=int(tenant_tokens),
    )


def to_claimed(reply: Sequence[Any]) -> Claimed:
    """From one task of the reply of `claim`."""
    task = named(reply)
    return Claimed(
        task_id=task["id"].decode(),
        owner=task["owner"].decode(),
        attempt=int(task["attempt"]),
        queue=task["queue"].decode(),
        priority=int(task["priority"]),
        accepted_at=int(task["accepted_us"]) / 1e6,
        data=task["data"],
        waited_seconds=float(task["waited_seconds"]),
        num_entries=int(task["num_entries"]),
        prompt_token_ids=tuple(json.loads(task["prompt_ids"])) if task["prompt_ids"] else None,
        fingerprint=task["fingerprint"].decode() or None,
        sampling_defaults=task["sampling_defaults"].decode(),
        num_outputs=int(task["num_outputs"]),
        has_started=bool(task["has_started"]),
        cached_tokens=int(task["cached_tokens"]),
        suspect=bool(task["suspect"]),
        tenant=task["tenant"].decode(),
        request_id=task["request_id"].decode(),
    )


def to_outcome(write: Write, code: int | bytes) -> Outcome:
    """From one item of the reply of `publish`.

    A write that failed counts as lost: its owner drops the task, which is claimed again when its lease
    lapses.
    """
    if isinstance(code, bytes):
        log_failures("not stored", (write.task_id.encode(), code))
        return Lost()
    return _OUTCOMES[code] if code in _OUTCOMES else Gap(code)


def to_failures(duty: str, items: Iterable[bytes]) -> Iterator[ReapFailure]:
    """From `[record, reason, record, reason, ...]`."""
    words = iter(texts(items))
    return (ReapFailure(duty, record, reason) for record, reason in zip(words, words, strict=True))


def log_failures(what: str, items: Iterable[bytes]) -> None:
    """Log one line for each record that a script could not process."""
    for failure in to_failures(what, items):
        logger.error("%s: %s: %s", failure.record, what, failure.reason)


def to_snapshot(task_id: str, reply: Sequence[Any]) -> TaskSnapshot:
    """From the reply of `inspect`."""
    run_hash, num_entries, now, position, tokens_ahead, drain_rate, num_ready_workers, due = reply
    run = {name: value.decode() for name, value in named(run_hash).items() if value}
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
        webhook=_webhook(run, _float(due)),
        request_id=run.get("request_id"),
    )


def to_listed_tasks(rows: Iterable[Sequence[Any]], now: Any) -> Iterator[ListedTask]:
    """From the rows of the reply of `list`. A record with a damaged field is left out, and logged."""
    for row in rows:
        try:
            yield _to_listed_task(row, now)
        except (KeyError, ValueError, ProtocolError) as error:
            logger.error("task %s is not listed: its record is damaged (%r)", row[0].decode(), error)


def _to_listed_task(row: Sequence[Any], now: Any) -> ListedTask:
    task_id, run_hash, num_entries, last_entry = row
    snapshot = to_snapshot(task_id.decode(), (run_hash, num_entries, now, None, None, None, 0, None))
    fields = None if last_entry is None else dict(zip(last_entry[::2], last_entry[1::2], strict=True))
    json.loads(snapshot.metadata)
    entry = None if fields is None else LogEntry.of_fields(fields)
    if entry:
        entry.parse_members()
    return ListedTask(snapshot, entry)


def _webhook(run: Mapping[str, str], due: float | None) -> WebhookDelivery | None:
    url = run.get("webhook") or run.get("webhook_url")
    if url is None:
        return None
    return WebhookDelivery(
        url=url,
        state=cast("Any", "pending" if "webhook" in run else run.get("webhook_state", "failed")),
        attempts=int(run.get("webhook_tries", "0")),
        last_status=_int(run.get("webhook_status")),
        last_error=run.get("webhook_error"),
        next_attempt_at=due,
        ended_at=_float(run.get("webhook_at")),
    )


def to_queue_stats(reply: Sequence[Any]) -> QueueStats:
    """From the reply of `queue_stats`."""
    classes, oldest, cost, claimed, now, drain_rate, num_ready_workers, totals, due, later = reply
    waiting = dict.fromkeys(PRIORITIES, 0)
    for priority, count in named(classes).items():
        waiting[int(priority)] = waiting.get(int(priority), 0) + int(count)
    return QueueStats(
        waiting=waiting,
        oldest_age=0.0 if oldest is None else max(0.0, float(now) - float(oldest)),
        waiting_cost=int(cost),
        claimed=int(claimed),
        drain_rate=_float(drain_rate),
        num_ready_workers=int(num_ready_workers),
        totals={name: int(value) for name, value in named(totals).items()},
        webhooks_due=int(due),
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
