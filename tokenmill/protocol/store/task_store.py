"""The only interface to the tasks in Redis. Each method that changes a task runs one script, so the change is
atomic.
"""

import hashlib
import json
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from tokenmill.protocol import keys, log, rq_keys, steps
from tokenmill.protocol.claim_order import DEFAULT_ORDER, ClaimOrder
from tokenmill.protocol.messages import Event, GenerateRequest, LogEntry
from tokenmill.protocol.naming import tenant_hash
from tokenmill.protocol.records import (
    Claimed,
    IdempotencyConflict,
    ModelCard,
    Outcome,
    Renewed,
    Submission,
    Submitted,
    TaskPhase,
    WorkerRecord,
    Write,
)
from tokenmill.protocol.snapshots import ListCursor, QueueStats, Reading, TaskPage, TaskSnapshot
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.packing import packed
from tokenmill.protocol.store.reaping import MAX_RECORDS, Reaping
from tokenmill.protocol.store.replies import (
    log_failures,
    texts,
    to_claimed,
    to_listed_tasks,
    to_outcome,
    to_queue_full,
    to_queue_stats,
    to_snapshot,
)
from tokenmill.protocol.store.scripting import RedisClient, Scripts

_WORKER_INDEX_SECONDS = 480
"""RQ keeps a worker's index of executions for this time after its last heartbeat."""


class TaskStore:
    """Tasks in one Redis database. `client`: redis-py's, with `decode_responses=False`.

    `retention_seconds`: how long the keys of a task are kept after its end. Every method may raise the
    client's connection errors and can then be called again with the same arguments.
    """

    def __init__(self, client: RedisClient, *, retention_seconds: float = 3600) -> None:
        self._client = client
        self._scripts = Scripts(client, retention_seconds=retention_seconds)
        self.reap = Reaping(self._scripts).reap

    def submit(self, submission: Submission) -> Submitted:
        """Store and queue a task. Raises `QueueFull` or `IdempotencyConflict`; then nothing is stored."""
        run = _run_fields(submission)
        outcome, *details = self._run(
            "tasks/submit",
            submission.task_id,
            submission.body_digest,
            "" if submission.max_waiting is None else submission.max_waiting,
            "" if submission.max_waiting_tokens is None else submission.max_waiting_tokens,
            int(submission.share_limits),
            len(run),
            *chain.from_iterable(run.items()),
            *chain.from_iterable(submission.job_fields.items()),
        )
        if outcome == b"conflict":
            raise IdempotencyConflict
        if outcome == b"full":
            raise to_queue_full(details)
        return Submitted(details[0].decode(), replayed=outcome == b"replayed")

    def claim(
        self,
        slug: str,
        *,
        worker: str,
        max_tasks: int,
        lease_seconds: float,
        order: ClaimOrder = DEFAULT_ORDER,
    ) -> list[Claimed]:
        """Claim up to `max_tasks` waiting tasks of a model, the most urgent first (see `claim_order.lua`).

        `order` is stored, and the positions of `inspect` follow it until another claim changes it. Tasks
        claimed by a call whose reply was lost return to the queue when their lease lapses. A call ends at
        most `MAX_RECORDS` tasks that RQ's own tools removed; then it may return fewer tasks than are waiting.
        """
        owners = (secrets.token_hex(16) for _ in range(max_tasks))
        replies = self._run(
            "tasks/claim",
            slug,
            worker,
            lease_seconds,
            _WORKER_INDEX_SECONDS,
            MAX_RECORDS,
            order.to_text(),
            *owners,
        )
        return [to_claimed(reply) for reply in replies]

    def publish(self, writes: Sequence[Write]) -> list[Outcome]:
        """Add entries, facts and settlements in one atomic change; one outcome for each write."""
        if not writes:
            return []
        codes = self._run("tasks/publish", packed(writes))
        return [to_outcome(write, code) for write, code in zip(writes, codes, strict=True)]

    def renew(
        self,
        owned: Mapping[str, str],
        lease_seconds: float,
        phases: Mapping[str, TaskPhase] | None = None,
    ) -> Renewed:
        """Extend the leases of `owned` (task -> owner).

        `phases`: what the worker is doing with each task, recorded in case it crashes; `seated` by default. A
        crash that was recorded for an owner which renews after all is retracted.
        """
        if not owned:
            return Renewed()
        phases = phases or {}
        rows = ((task_id, owner, phases.get(task_id, "seated")) for task_id, owner in owned.items())
        lost, cancelled, failures = self._run("tasks/renew", lease_seconds, *chain.from_iterable(rows))
        log_failures("not renewed", failures)
        return Renewed(lost=frozenset(texts(lost)), cancelled=frozenset(texts(cancelled)))

    def hand_back(self, owned: Mapping[str, str], *, crashed: bool = False) -> int:
        """Return `owned` (task -> owner) to the front of their queues, in order of acceptance.

        `crashed`: the worker ends because of an error that one of them may have caused; a crash is recorded
        for each, and a task with too many of them ends as poisoned. Returns the number of tasks requeued.
        """
        if not owned:
            return 0
        error = script_errors.POISON if crashed else script_errors.NO_ERROR
        pairs = chain.from_iterable(owned.items())
        returned, failures = self._run("tasks/hand_back", *error, rq_keys.RESULT_FAILED, *pairs)
        log_failures("not handed back", failures)
        return int(returned)

    def cancel(self, task_id: str) -> str | None:
        """End a task as cancelled. Returns its final status: `cancelled`, or `completed` or `failed` if it
        had ended before; None if there is no such task.
        """
        status = self._run("tasks/cancel", task_id)
        return None if status is None else str(status.decode())

    def erase(self, task_id: str) -> bool | None:
        """Delete everything about an ended task. False if it has not ended; None if there is no such task."""
        erased = self._run("tasks/erase", task_id)
        return None if erased is None else bool(erased)

    def list_tasks(
        self,
        tenant: str,
        *,
        after: ListCursor | None = None,
        status: str = "",
        model: str = "",
        accepted_from_us: int | None = None,
        accepted_before_us: int | None = None,
        max_examined: int = log.PAGE // 5,
    ) -> TaskPage:
        """Tasks of a tenant that fit the filters, newest first.

        Looks at `max_examined` tasks at most, so a page may be empty and not the last one.
        """
        newest = "+inf" if accepted_before_us is None else f"({accepted_before_us}"
        examined, accepted_us, task_id, rows, now = self._run(
            "tasks/list",
            tenant_hash(tenant),
            _older(after.accepted_us, newest) if after else newest,
            after.task_id if after else "",
            "-inf" if accepted_from_us is None else accepted_from_us,
            max_examined,
            status,
            model,
        )
        is_last = examined < max_examined
        cursor = None if is_last else ListCursor(accepted_us.decode(), task_id.decode())
        return TaskPage(list(to_listed_tasks(rows, now)), cursor)

    def inspect(self, task_id: str, tenant: str | None = None) -> TaskSnapshot | None:
        """The state of a task, without its log. None if there is no such task, or it is not `tenant`'s."""
        reply = self._run("tasks/inspect", task_id)
        snapshot = None if reply is None else to_snapshot(task_id, reply)
        return snapshot if snapshot and tenant in (None, snapshot.tenant) else None

    def is_lost(self, task_id: str, tenant: str | None = None) -> bool:
        """Whether the RQ job of a task without a run hash still exists: Redis lost the rest."""
        origin = self._client.hget(rq_keys.job(task_id), "origin")
        return bool(origin) and (tenant is None or origin.decode().endswith(f":{tenant_hash(tenant)}"))

    def request(self, task_id: str) -> GenerateRequest | None:
        """The request of a task, as it was submitted; None if there is no such task."""
        data = self._client.hget(rq_keys.job(task_id), "data")
        if data is None:
            return None
        arguments = json.loads(zlib.decompress(data))[2]
        return GenerateRequest.from_payload(arguments[0])

    def read(self, task_id: str, tenant: str | None = None) -> Reading | None:
        """The state of a task with its log. None if there is no such task, or it is not `tenant`'s.

        The log only grows, so its first entries are those of the snapshot. A log that has become shorter has
        expired or lost entries in a failover; then all is read again.
        """
        while snapshot := self.inspect(task_id, tenant):
            entries = self.log_entries(task_id, snapshot.num_entries)
            if len(entries) == snapshot.num_entries:
                return Reading(snapshot, entries)
        return None

    def log_entries(self, task_id: str, count: int) -> tuple[LogEntry, ...]:
        """The first `count` entries of a log, or all if it has fewer."""
        return tuple(LogEntry.of_fields(fields) for _, fields in self._rows(task_id, -1, count))

    def read_log(self, task_id: str, after: int = -1, count: int = log.MAX_SEQ) -> list[Event]:
        """Up to `count` events with a `seq` greater than `after`, in order."""
        return log.to_events(task_id, self._rows(task_id, after, count))

    def put_worker(self, record: WorkerRecord, ttl_seconds: float) -> None:
        """Store a worker's record, which expires after `ttl_seconds`."""
        ready = int(record.state == "ready")
        ttl_ms = max(1, round(ttl_seconds * 1000))
        self._run("workers/put_worker", record.name, record.slug, ready, record.to_json(), ttl_ms)

    def drop_worker(self, name: str) -> None:
        self._run("workers/drop_worker", name)

    def workers(self) -> list[WorkerRecord]:
        """The unexpired records of the workers of all models."""
        return [WorkerRecord.from_json(record) for record in self._run("workers/list_workers")]

    def has_steps(self, name: str, slug: str) -> bool:
        """Whether a worker of the model exists, or its steps are kept after its end."""
        text = self._client.get(keys.worker(name))
        if text:
            return bool(json.loads(text)["slug"] == slug)
        return bool(self._client.exists(keys.steps(name)))

    def read_steps(self, name: str) -> list[bytes]:
        """The recorded steps of a worker, oldest first, see `tokenmill/protocol/steps.py`."""
        rows = self._client.xrevrange(keys.steps(name), count=steps.MAX_ENTRIES)
        return [fields[steps.FIELD] for _, fields in reversed(rows)]

    def put_model_card(self, slug: str, card: ModelCard) -> None:
        self._client.set(keys.model_card(slug), card.to_json())

    def restore_model_card(self, slug: str, card: ModelCard) -> None:
        """Store the card if there is none, as after a loss of data; another worker's card is kept."""
        self._client.set(keys.model_card(slug), card.to_json(), nx=True)

    def model_card(self, slug: str) -> ModelCard | None:
        """None if no worker has ever served this model here."""
        card = self._client.get(keys.model_card(slug))
        return None if card is None else ModelCard.from_json(card)

    def queue_stats(self, slug: str) -> QueueStats:
        """Statistics of a model's queues. The cost does not grow with the waiting tasks."""
        return to_queue_stats(self._run("tasks/queue_stats", slug))

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._scripts.run(script, *arguments)

    def _rows(self, task_id: str, after: int, count: int) -> Iterator[log.Row]:
        """Up to `count` rows of a log, in pages: Redis serves other clients in between."""
        while count > 0:
            page = min(count, log.PAGE)
            rows = self._client.xrange(keys.log(task_id), min=log.first_id(after), count=page)
            yield from rows
            if len(rows) < page:
                return
            after, count = log.entry_seq(rows[-1][0]), count - page


def _older(accepted_us: str, newest: str) -> str:
    """The start of a page after a cursor, which must not be newer than the filter allows."""
    limit = newest.removeprefix("(")
    return newest if limit != "+inf" and float(limit) <= float(accepted_us) else accepted_us


def _run_fields(submission: Submission) -> dict[str, str | int]:
    """The fields of the run hash that a submission sets; empty ones are left out."""
    idempotency = ""
    if submission.idempotency_key is not None:
        digest = hashlib.sha256(submission.idempotency_key.encode(errors="surrogatepass")).hexdigest()
        idempotency = keys.idempotency(tenant_hash(submission.tenant), digest)
    fields: dict[str, str | int] = {
        "queue": submission.queue,
        "slug": submission.slug,
        "model": submission.model,
        "priority": submission.priority,
        "tenant": submission.tenant,
        "cost": submission.cost,
        "metadata": submission.metadata,
        "n": submission.num_outputs,
        **{name: _seconds(limit) for name, limit in asdict(submission.limits).items()},
        "idempotency": idempotency,
        "webhook": submission.webhook,
        "request_id": submission.request_id,
        "on_disconnect": "cancel" if submission.cancel_on_disconnect else "",
    }
    return {name: value for name, value in fields.items() if value != ""}


def _seconds(limit: float | None) -> str:
    """In the form that error messages show."""
    if limit is None:
        return ""
    return str(int(limit)) if limit == int(limit) else repr(limit)
