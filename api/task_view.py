"""A snapshot of a task as its JSON shows it. Pure functions."""

import json
from collections.abc import Iterable
from typing import Any

from api.reply_schemas import ErrorView, Output, QueuePlace, Task, Timings, Urls, UsageView
from worker.protocol.messages import LogEntry
from worker.protocol.store import TaskSnapshot

TERMINAL = frozenset({"completed", "failed", "cancelled"})


def task_url(task_id: str) -> str:
    return f"/v1/tasks/{task_id}"


def view(snapshot: TaskSnapshot) -> Task:
    """The task object of every reply that carries one."""
    url = task_url(snapshot.task_id)
    last = _end_members(snapshot.entries[-1]) if snapshot.entries else {}
    return Task(
        id=snapshot.task_id,
        status=snapshot.status,
        created_at=round(snapshot.accepted_at, 3),
        model=snapshot.model,
        priority=snapshot.priority,
        queue=_place(snapshot) if snapshot.status == "queued" else None,
        outputs=_outputs(snapshot.entries),
        usage=_usage(snapshot, last.get("usage")),
        timings=_timings(snapshot),
        error=ErrorView(**last["error"]) if last.get("error") else None,
        urls=Urls(self=url, events=f"{url}/events", cancel=f"{url}/cancel"),
        metadata=json.loads(snapshot.metadata),
    )


def eta_seconds(snapshot: TaskSnapshot) -> float | None:
    """Seconds until a waiting task starts, as the last minute went; None where that says nothing."""
    if snapshot.tokens_ahead is None or not snapshot.drain_rate or not snapshot.num_ready_workers:
        return None
    return round(snapshot.tokens_ahead / snapshot.drain_rate, 3)


def _place(snapshot: TaskSnapshot) -> QueuePlace:
    return QueuePlace(
        position=snapshot.position,
        tokens_ahead=snapshot.tokens_ahead,
        eta_seconds=eta_seconds(snapshot),
        waiting_for=snapshot.waiting_for,
    )


def _outputs(entries: Iterable[LogEntry]) -> list[Output]:
    """One for each index that has begun, the first always."""
    outputs: dict[int, Output] = {}
    texts: dict[int, list[str]] = {}
    for entry in (LogEntry("", '""'), *entries):
        index = int(entry.index)
        if index not in outputs:
            outputs[index] = Output(index=index, text="", token_ids=[], finish_reason=None)
            texts[index] = []
        texts[index].append(json.loads(entry.text))
        if entry.token:
            outputs[index].token_ids.append(int(entry.token))
        if entry.end:
            outputs[index].finish_reason = _end_members(entry)["finish_reason"]
    for index, output in outputs.items():
        output.text = "".join(texts[index])
    return [outputs[index] for index in sorted(outputs)]


def _usage(snapshot: TaskSnapshot, final: dict[str, int] | None) -> UsageView | None:
    if final:
        return UsageView(**final)
    if snapshot.prompt_tokens is None:
        return None
    completion = sum(1 for entry in snapshot.entries if entry.token)
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


def _end_members(entry: LogEntry) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(f"{{{entry.end}}}")
    return members
