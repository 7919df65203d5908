"""Tasks for tests: submitted with RQ's own jobs, claimed, written to, settled."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.redis_client import RedisClient
from tokenmill.protocol import keys
from tokenmill.protocol.messages import JOB_FUNCTION, LogEntry, Usage
from tokenmill.protocol.naming import model_slug, new_task_id, queue_name
from tokenmill.protocol.records import Claimed, Outcome, Reaped, Settlement, Submission, Write
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.task_store import TaskStore

MODEL = "tiny/model"
SLUG = model_slug(MODEL)
HARD_TEXTS = ["\x00", "\u2028\u2029\x85", '"\\', "\U0001f600", "e\u0301", "\x7f\x1b", "</script>", "", "\r\n"]
"""Texts that careless encoding breaks."""
RESULT = {"outputs": [{"index": 0, "text": "hi"}], "usage": {"prompt_tokens": 3}}


def submission(client: RedisClient, **changes: Any) -> Submission:
    """A valid submission of a task of MODEL. `changes`: other values for fields of `Submission`."""
    task_id = changes.setdefault("task_id", new_task_id())
    priority = changes.setdefault("priority", 2)
    tenant = changes.setdefault("tenant", "default")
    queue = queue_name(SLUG, priority, tenant)
    job = Job.create(
        JOB_FUNCTION,
        args=({"id": task_id, "prompt": "hello"},),
        id=task_id,
        origin=queue,
        description="generate",
        timeout=-1,
        result_ttl=3600,
        serializer=JSONSerializer,
        connection=client,
    )
    values: dict[str, Any] = {"queue": queue, "slug": SLUG, "model": MODEL, "cost": 10}
    return Submission(**({**values, "job_fields": job.to_dict()} | changes))


def snapshot_of(store: TaskStore, task_id: str) -> TaskSnapshot:
    """The snapshot of an existing task."""
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    return snapshot


def submit(store: TaskStore, client: RedisClient, **changes: Any) -> str:
    """Submit a task and return its id."""
    return store.submit(submission(client, **changes)).task_id


def claim(store: TaskStore, max_tasks: int = 100, lease_seconds: float = 60) -> list[Claimed]:
    """Claim tasks with their logs, as a worker does."""
    claimed = store.claim(SLUG, worker="worker-1", max_tasks=max_tasks, lease_seconds=lease_seconds)
    return [replace(one, entries=store.log_entries(one.task_id, one.num_entries)) for one in claimed]


def log_of(store: TaskStore, task_id: str) -> tuple[LogEntry, ...]:
    """The log of a task as shown with it."""
    reading = store.read(task_id)
    assert reading is not None
    return reading.entries


def claim_one(store: TaskStore, lease_seconds: float = 60) -> Claimed:
    (claimed,) = claim(store, 1, lease_seconds)
    return claimed


def tokens(first: int, count: int) -> tuple[LogEntry, ...]:
    """`count` entries from seq `first` on; the id of each token is its `seq`."""
    return tuple(LogEntry.of_token(seq, f" t{seq}") for seq in range(first, first + count))


def publish(store: TaskStore, claimed: Claimed, first: int, count: int, **facts: str) -> Outcome:
    write = Write(
        task_id=claimed.task_id,
        owner=claimed.owner,
        first_seq=first,
        entries=tokens(first, count),
        facts=facts,
    )
    (outcome,) = store.publish([write])
    return outcome


def final_write(
    claimed: Claimed, first: int = 0, count: int = 0, reason: str = "stop", **changes: Any
) -> Write:
    """`count` tokens, the last entry and the settlement."""
    usage = Usage(prompt_tokens=3, completion_tokens=first + count)
    failed = reason not in ("stop", "length")
    settlement = Settlement(
        status="failed" if failed else "completed",
        reason=reason,
        result=json.dumps(RESULT),
        error_text="it broke" if failed else "",
        prompt_tokens=3,
        completion_tokens=first + count,
    )
    values: dict[str, Any] = {
        "task_id": claimed.task_id,
        "owner": claimed.owner,
        "first_seq": first,
        "entries": (*tokens(first, count), LogEntry.of_end("", reason, usage=usage)),
        "settlement": settlement,
    }
    return Write(**(values | changes))


def settle(
    store: TaskStore, claimed: Claimed, first: int = 0, count: int = 0, reason: str = "stop"
) -> Outcome:
    (outcome,) = store.publish([final_write(claimed, first, count, reason)])
    return outcome


def owned(claimed: Sequence[Claimed]) -> Mapping[str, str]:
    return {one.task_id: one.owner for one in claimed}


def fetch(client: RedisClient, task_id: str) -> Job:
    """The job of a task as RQ sees it."""
    return Job.fetch(task_id, connection=client, serializer=JSONSerializer)


def dump(client: RedisClient) -> dict[bytes, Any]:
    """The whole database, to check that a call changes nothing."""
    return {key: client.dump(key) for key in client.scan_iter()}


def unchanged(client: RedisClient, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, which must not change the database."""
    before = dump(client)
    outcome = call()
    assert dump(client) == before
    return outcome


def waiting(client: RedisClient, queue: str) -> list[str]:
    """The waiting tasks in order; RQ's list must agree."""
    order = [task_id.decode() for task_id in client.zrange(keys.order(queue), 0, -1)]
    assert Queue(queue, connection=client).job_ids == order
    return order


def reap(store: TaskStore, max_task_seconds: float = 3600) -> Reaped:
    return store.reap(SLUG, max_task_seconds=max_task_seconds)
