"""Converts a snapshot of a task and its log into the `Task` of the HTTP API."""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from urllib.parse import urlsplit, urlunsplit

from api.schemas.replies import (
    ErrorView,
    Output,
    OutputLimitView,
    PromptLogprobsView,
    QueuePosition,
    Task,
    TaskSummary,
    Timings,
    Urls,
    UsageView,
    WebhookDeliveryView,
)
from tokenmill.protocol.log import TaskOutput, num_tokens_of, outputs_of, prompt_logprobs_of
from tokenmill.protocol.messages import LogEntry
from tokenmill.protocol.snapshots import ListedTask, Reading, TaskSnapshot

TERMINAL = frozenset({"completed", "failed", "cancelled"})


def task_url(task_id: str) -> str:
    return f"/v1/tasks/{task_id}"


def view(reading: Reading) -> Task:
    """The `Task` of every reply and webhook."""
    snapshot, entries = reading
    last = entries[-1].parse_members() if entries else {}
    done = last if last.get("done") else {}
    return Task(
        id=snapshot.task_id,
        status=snapshot.status,
        created_at=round(snapshot.accepted_at, 3),
        model=snapshot.model,
        priority=snapshot.priority,
        queue=_queue_position(snapshot) if _waits(snapshot) else None,
        outputs=[_output(output) for output in outputs_of(entries, snapshot.num_outputs)],
        prompt_logprobs=_prompt_logprobs(entries),
        usage=_usage(reading, done.get("usage")),
        output_limit=OutputLimitView(**json.loads(snapshot.output_limit)) if snapshot.output_limit else None,
        timings=_timings(snapshot),
        error=ErrorView(**done["error"]) if done.get("error") else None,
        urls=_urls(snapshot),
        metadata=json.loads(snapshot.metadata),
        request_id=snapshot.request_id,
        webhook=_webhook(snapshot),
        request=None,
    )


def summary(task: ListedTask) -> TaskSummary:
    """The `TaskSummary` of a list."""
    snapshot, last_entry = task
    last = last_entry.parse_members() if last_entry else {}
    done = last if last.get("done") else {}
    usage = done.get("usage")
    if usage is None and snapshot.prompt_tokens is not None:
        usage = _usage_so_far(snapshot, snapshot.num_entries)
    return TaskSummary(
        id=snapshot.task_id,
        status=snapshot.status,
        created_at=round(snapshot.accepted_at, 3),
        model=snapshot.model,
        priority=snapshot.priority,
        usage=usage,
        timings=_timings(snapshot),
        error=done.get("error"),
        urls=_urls(snapshot),
        metadata=json.loads(snapshot.metadata),
        request_id=snapshot.request_id,
        webhook=_webhook(snapshot),
    )


def eta_seconds(snapshot: TaskSnapshot) -> float | None:
    """Estimated seconds until a waiting task starts, from the rate of the last minute. None: unknown."""
    if snapshot.tokens_ahead is None or not snapshot.drain_rate or not snapshot.num_ready_workers:
        return None
    return round(snapshot.tokens_ahead / snapshot.drain_rate, 3)


def _waits(snapshot: TaskSnapshot) -> bool:
    """Whether the task waits: before its first step, or after it was preempted or handed back."""
    if snapshot.status in TERMINAL:
        return False
    return snapshot.status == "queued" or snapshot.position is not None


def _output(output: TaskOutput) -> Output:
    # `asdict` would copy every log-probability, which takes half of a poll's time.
    return Output(**{field.name: getattr(output, field.name) for field in fields(TaskOutput)})


def _queue_position(snapshot: TaskSnapshot) -> QueuePosition:
    return QueuePosition(
        position=snapshot.position,
        tokens_ahead=snapshot.tokens_ahead,
        eta_seconds=eta_seconds(snapshot),
        waiting_for=snapshot.waiting_for,
    )


def _prompt_logprobs(entries: Iterable[LogEntry]) -> list[PromptLogprobsView | None] | None:
    logprobs = prompt_logprobs_of(entries)
    if logprobs is None:
        return None
    return [None if one is None else PromptLogprobsView(**one) for one in logprobs]


def _usage(reading: Reading, final: dict[str, int] | None) -> UsageView | None:
    snapshot = reading.snapshot
    if final:
        return UsageView(**final)
    if snapshot.prompt_tokens is None:
        return None
    return UsageView(**_usage_so_far(snapshot, num_tokens_of(reading.entries)))


def _usage_so_far(snapshot: TaskSnapshot, completion: int) -> dict[str, int]:
    prompt = snapshot.prompt_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cached_tokens": snapshot.cached_tokens,
    }


def _urls(snapshot: TaskSnapshot) -> Urls:
    url = task_url(snapshot.task_id)
    return Urls(self=url, events=f"{url}/events", cancel=f"{url}/cancel")


def _webhook(snapshot: TaskSnapshot) -> WebhookDeliveryView | None:
    delivery = snapshot.webhook
    if delivery is None:
        return None
    url = urlsplit(delivery.url)
    host = url.netloc.rpartition("@")[2]
    fields = {**asdict(delivery), "url": urlunsplit((url.scheme, host, url.path, "", ""))}
    return WebhookDeliveryView(**fields)


def _timings(snapshot: TaskSnapshot) -> Timings:
    def since_accepted(moment: float | None) -> float | None:
        return None if moment is None else round(max(0.0, moment - snapshot.accepted_at), 6)

    return Timings(
        queue_seconds=since_accepted(snapshot.scheduled_at),
        ttft_seconds=since_accepted(snapshot.first_token_at),
        total_seconds=since_accepted(snapshot.finished_at),
    )
