"""The one door to the tasks in Redis: each method is one script, so each change is whole or not at all.

Knows no policy: who may submit, what to claim next on a worker and when to reap is decided by the callers.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, cast

from tokenmill.protocol import event_log, keys, rq_keys
from tokenmill.protocol.claim_order import DEFAULT_ORDER, ClaimOrder
from tokenmill.protocol.messages import Event, LogEntry, entry_seq
from tokenmill.protocol.model_card import ModelCard
from tokenmill.protocol.naming import tenant_hash
from tokenmill.protocol.records import (
    Accepted,
    Cancelled,
    Claimed,
    Gap,
    IdempotencyConflict,
    Lost,
    Outcome,
    QueueFull,
    QueueStats,
    Reaped,
    Renewed,
    Settlement,
    Submission,
    Submitted,
    TaskPhase,
    WorkerRecord,
    Write,
)
from tokenmill.protocol.snapshots import Reading, TaskSnapshot, to_queue_stats, to_snapshot
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.packing import packed
from tokenmill.protocol.store.reaping import Reaping, decoded, log_failures
from tokenmill.protocol.store.scripting import RedisClient, Scripts

__all__ = [
    "Accepted",
    "Cancelled",
    "Claimed",
    "Gap",
    "IdempotencyConflict",
    "Lost",
    "Outcome",
    "QueueFull",
    "QueueStats",
    "Reading",
    "Reaped",
    "Renewed",
    "Settlement",
    "Submission",
    "Submitted",
    "TaskPhase",
    "TaskSnapshot",
    "TaskStore",
    "WorkerRecord",
    "Write",
]


_OUTCOMES: Mapping[int, Outcome] = {-1: Accepted(), -2: Lost(), -3: Cancelled()}
"""As `publish.lua` numbers them; any other number is the length of a log."""

_TREATED_AT_ONCE = 100
"""One script treats so many that lapsed, waited too long or were moved by others: Redis does nothing else."""
_WORKER_INDEX_SECONDS = 480
"""RQ keeps a worker's index of executions so long after its last heartbeat."""


class TaskStore:
    """Tasks in one Redis database. `client`: redis-py's, with `decode_responses=False`.

    `retention_seconds`: how long all of a task is kept after its end. Every method may raise the client's
    connection errors; calling it again with the same arguments is safe then.
    """

    def __init__(self, client: RedisClient, *, retention_seconds: float = 3600) -> None:
        self._client = client
        self._scripts = Scripts(client, retention_seconds=retention_seconds)
        self.reap = Reaping(self._scripts).reap

    def submit(self, submission: Submission) -> Submitted:
        """Store and queue a task. Raises `QueueFull`, `IdempotencyConflict`; then nothing is stored."""
        record = ""
        if submission.idempotency_key is not None:
            record = keys.idempotency(tenant_hash(submission.tenant), _digest(submission.idempotency_key))
        outcome, *details = self._run(
            "submit",
            submission.task_id,
            submission.queue,
            submission.slug,
            submission.model,
            submission.priority,
            submission.tenant,
            submission.cost,
            submission.metadata,
            record,
            submission.body_digest,
            "" if submission.max_waiting is None else submission.max_waiting,
            "" if submission.max_waiting_tokens is None else submission.max_waiting_tokens,
            int(submission.share_limits),
            submission.num_outputs,
            *map(_seconds, submission.limits),
            submission.webhook,
            "cancel" if submission.cancel_on_disconnect else "",
            *chain.from_iterable(submission.job_fields.items()),
        )
        if outcome == b"conflict":
            raise IdempotencyConflict
        if outcome == b"full":
            raise _queue_full(*details)
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
        """Take up to `max_tasks` waiting tasks of a model, the most urgent first; see `turns.lua`.

        `order` is stored, so that the positions of `inspect` follow from it until another claim changes it.
        What was claimed by a call whose reply was lost comes back when its lease lapses. A call that meets
        more than a hundred tasks which RQ's own tools ended may give fewer than wait; the next goes on.
        """
        owners = (secrets.token_hex(16) for _ in range(max_tasks))
        rows = self._run(
            "claim",
            slug,
            worker,
            lease_seconds,
            _WORKER_INDEX_SECONDS,
            _TREATED_AT_ONCE,
            order.to_text(),
            *owners,
        )
        return [_claimed(*row) for row in rows]

    def publish(self, writes: Sequence[Write]) -> list[Outcome]:
        """Add messages, facts and settlements, all in one change; one outcome for each write."""
        if not writes:
            return []
        outcomes = self._run("publish", packed(writes))
        return [_outcome(write, code) for write, code in zip(writes, outcomes, strict=True)]

    def renew(
        self, owned: Mapping[str, str], lease_seconds: float, standings: Mapping[str, TaskPhase] | None = None
    ) -> Renewed:
        """Let the leases of `owned` (task -> owner) lapse that much later; tells which are not owned.

        `standings`: how each task stands in its worker, for whoever asks after a crash; `seated` if not said.
        An owner that was taken for dead, and is not, takes back by this what was counted on its account.
        """
        if not owned:
            return Renewed()
        said = standings or {}
        rows = ((task_id, owner, said.get(task_id, "seated")) for task_id, owner in owned.items())
        lost, cancelled, failures = self._run("renew", lease_seconds, *chain.from_iterable(rows))
        log_failures("not renewed", failures)
        return Renewed(lost=frozenset(decoded(lost)), cancelled=frozenset(decoded(cancelled)))

    def hand_back(self, owned: Mapping[str, str], *, crashed: bool = False) -> int:
        """Put `owned` (task -> owner) back to the front in order of acceptance. Gives how many.

        `crashed`: the worker ends for what may be the fault of one of them, which counts as if it had died.
        One that is to blame for that then ends as poisoned.
        """
        if not owned:
            return 0
        how = script_errors.POISON if crashed else script_errors.NO_ERROR
        pairs = chain.from_iterable(owned.items())
        returned, failures = self._run("hand_back", *how, rq_keys.RESULT_FAILED, *pairs)
        log_failures("not handed back", failures)
        return int(returned)

    def cancel(self, task_id: str) -> str | None:
        """End a task as cancelled, whatever its state. None: no such task; else the status it has ended in:
        `cancelled`, or `completed` or `failed` if that came first.
        """
        status = self._run("cancel", task_id)
        return None if status is None else str(status.decode())

    def inspect(self, task_id: str, tenant: str | None = None) -> TaskSnapshot | None:
        """All that is known of a task at one moment, but for its log.

        None: no such task, or with a `tenant` none of its own.
        """
        reply = self._run("inspect", task_id)
        snapshot = None if reply is None else to_snapshot(task_id, reply)
        return snapshot if snapshot and tenant in (None, snapshot.tenant) else None

    def is_lost(self, task_id: str, tenant: str | None = None) -> bool:
        """Whether a part of a task that nothing else is known of is still here: Redis lost the rest."""
        origin = self._client.hget(rq_keys.job(task_id), "origin")
        return bool(origin) and (tenant is None or origin.decode().endswith(f":{tenant_hash(tenant)}"))

    def read(self, task_id: str, tenant: str | None = None) -> Reading | None:
        """A task with its log of the same moment. None: no such task, or with a `tenant` none of its own.

        The log only grows, so its first entries are those of the moment. One that has become shorter expired
        or lost its end with its host meanwhile: that is another moment, so all is looked at again.
        """
        while snapshot := self.inspect(task_id, tenant):
            entries = self.log_entries(task_id, snapshot.num_entries)
            if len(entries) == snapshot.num_entries:
                return Reading(snapshot, entries)
        return None

    def log_entries(self, task_id: str, count: int) -> tuple[LogEntry, ...]:
        """The first `count` entries of a log; fewer where it has fewer by now."""
        return tuple(LogEntry.of_fields(fields) for _, fields in self._rows(task_id, -1, count))

    def read_log(self, task_id: str, after: int = -1, count: int = event_log.MAX_SEQ) -> list[Event]:
        """Up to `count` messages with a `seq` greater than `after`, in order; empty where there are none."""
        return event_log.events(task_id, self._rows(task_id, after, count))

    def put_worker(self, record: WorkerRecord, ttl_seconds: float) -> None:
        """Tell what a worker does; forgotten after `ttl_seconds` unless told again."""
        ready = int(record.state == "ready")
        ttl_ms = max(1, round(ttl_seconds * 1000))
        self._run("put_worker", record.name, record.slug, ready, record.to_json(), ttl_ms)

    def drop_worker(self, name: str) -> None:
        self._run("drop_worker", name)

    def workers(self) -> list[WorkerRecord]:
        """The workers of all models that have reported lately."""
        return [WorkerRecord.from_json(record) for record in self._run("workers")]

    def put_model_card(self, slug: str, card: ModelCard) -> None:
        self._client.set(keys.model_card(slug), card.to_json())

    def restore_model_card(self, slug: str, card: ModelCard) -> None:
        """Write the card where none is, as after a loss of data; one that another worker wrote stays."""
        self._client.set(keys.model_card(slug), card.to_json(), nx=True)

    def model_card(self, slug: str) -> ModelCard | None:
        """None: no worker has ever served this model here."""
        card = self._client.get(keys.model_card(slug))
        return None if card is None else ModelCard.from_json(card)

    def queue_stats(self, slug: str) -> QueueStats:
        """Numbers of a model's queues; costs nothing for each waiting task."""
        return to_queue_stats(self._run("queue_stats", slug))

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._scripts.run(script, *arguments)

    def _rows(self, task_id: str, after: int, count: int) -> Iterator[event_log.Row]:
        """Up to `count` rows of a log, in pages and outside of scripts: Redis serves others in between."""
        while count > 0:
            asked = min(count, event_log.PAGE)
            rows = self._client.xrange(keys.log(task_id), min=event_log.first_id(after), count=asked)
            yield from rows
            if len(rows) < asked:
                return
            after, count = entry_seq(rows[-1][0]), count - asked


def _claimed(
    task_id: bytes,
    owner: bytes,
    attempt: int,
    queue: bytes,
    priority: bytes,
    accepted_us: bytes,
    waited_seconds: bytes,
    data: bytes,
    prompt_ids: bytes,
    fingerprint: bytes,
    num_outputs: bytes,
    has_started: bytes,
    cached_tokens: bytes,
    suspect: bytes,
    num_entries: int,
    sampling_defaults: bytes,
) -> Claimed:
    return Claimed(
        task_id=task_id.decode(),
        owner=owner.decode(),
        attempt=attempt,
        queue=queue.decode(),
        priority=int(priority),
        accepted_at=int(accepted_us) / 1e6,
        data=data,
        waited_seconds=float(waited_seconds),
        num_entries=num_entries,
        prompt_token_ids=tuple(json.loads(prompt_ids)) if prompt_ids else None,
        fingerprint=fingerprint.decode() or None,
        sampling_defaults=sampling_defaults.decode(),
        num_outputs=int(num_outputs),
        has_started=bool(has_started),
        cached_tokens=int(cached_tokens),
        suspect=bool(suspect),
    )


def _queue_full(
    limit_met: bytes, depth: int, tokens: bytes, whose: bytes, own_depth: int, own_tokens: bytes
) -> QueueFull:
    return QueueFull(
        limit_met=cast("Literal['tasks', 'tokens']", limit_met.decode()),
        whose=cast("Literal['all', 'tenant']", whose.decode()),
        depth=depth,
        tokens=int(tokens),
        own_depth=own_depth,
        own_tokens=int(own_tokens),
    )


def _outcome(write: Write, code: int | bytes) -> Outcome:
    """A write that failed is given up by its owner, as one that was lost; its task comes back later."""
    if isinstance(code, bytes):
        log_failures("not stored", (write.task_id.encode(), code))
        return Lost()
    return _OUTCOMES[code] if code in _OUTCOMES else Gap(code)


def _seconds(limit: float | None) -> str:
    """As a script reads it and a message shows it."""
    if limit is None:
        return ""
    return str(int(limit)) if limit == int(limit) else repr(limit)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
