"""Converts a snapshot of a task and its log into the `Task` of the HTTP API."""

import json
from collections.abc import Iterable
from dataclasses import fields

from api.schemas.replies import (
    ErrorView,
    Output,
    OutputLimitView,
    PromptLogprobsView,
    QueuePosition,
    Task,
    Timings,
    Urls,
    UsageView,
)
from tokenmill.protocol.log import TaskOutput, num_tokens_of, outputs_of, prompt_logprobs_of
from tokenmill.protocol.messages import LogEntry
from tokenmill.protocol.snapshots import Reading, TaskSnapshot

TERMINAL = frozenset({"completed", "failed", "cancelled"})


def task_url(task_id: str) -> str:
    return f"/v1/tasks/{task_id}"


def view(reading: Reading) -> Task:
    """The `Task` of every reply and webhook."""
    snapshot, entries = reading
    url = task_url(snapshot.task_id)
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
        urls=Urls(self=url, events=f"{url}/events", cancel=f"{url}/cancel"),
        metadata=json.loads(snapshot.metadata),
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
    completion = num_tokens_of(reading.entries)
    return UsageView(
        prompt_tokens=snapshot.prompt_tokens,
        completion_tokens=completion,
        total_tokens=snapshot.prompt_tokens + completion,
        cached_tokens=snapshot.cached_tokens,
    )


def _timings(snapshot: TaskSnapshot) -> Timings:
    def since_accepted(moment: float | None) -> float | None:
        return None if moment is None else round(max(0.0, moment - snapshot.accepted_at), 6)

    return Timings(
        queue_seconds=since_accepted(snapshot.scheduled_at),
        ttft_seconds=since_accepted(snapshot.first_token_at),
        total_seconds=since_accepted(snapshot.finished_at),
    )
