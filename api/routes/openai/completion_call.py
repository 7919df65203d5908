"""Runs the tasks of one completion call: submits them, follows their events, cancels them with their client.

Invariants: a call holds one stream slot from before its submission until its reply ends. A task that a client
waits for has a reader, so it is cancelled when the client disconnects.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import redis
import structlog
from flask import request

from api.authentication import current_tenant
from api.problems import Problem
from api.request_checks import check_request
from api.routes.openai.deltas import Delta, to_deltas, to_problem
from api.routes.slots import stream_slot
from api.routes.task_lookup import TaskLookup
from api.routes.task_services import TaskServices
from api.schemas.requests import TaskBody
from api.streams.reader_lease import ReaderLease
from tokenmill.protocol.messages import Event, FinishedEvent
from tokenmill.protocol.snapshots import TaskSnapshot

_log = structlog.get_logger(__name__)

TASK_HEADER = "X-Task-Id"
"""The ids of the tasks of a call, in the order of its prompts."""
STOPPING_SECONDS = 1
"""Retry-After while the server stops: another process or the next one answers."""


@dataclass(slots=True)
class Progress:
    """What has arrived of one task. `choice`: the index of its first output among those of the call.

    `replayed`: an earlier call with the same Idempotency-Key submitted it.
    """

    snapshot: TaskSnapshot
    choice: int
    replayed: bool
    usage: dict[str, int] | None = None
    num_tokens: int = 0
    prompt_tokens: int | None = None


class CompletionCall:
    """One call. `close` must be called when its reply has ended."""

    def __init__(self, services: TaskServices, lookup: TaskLookup) -> None:
        self._services = services
        self._lookup = lookup
        self._stack = ExitStack()
        self._leases: list[ReaderLease] = []
        self.tasks: list[Progress] = []

    def close(self) -> None:
        self._stack.close()

    @property
    def task_ids(self) -> str:
        """The value of `TASK_HEADER`."""
        return ", ".join(task.snapshot.task_id for task in self.tasks)

    def submit(self, bodies: Sequence[TaskBody], idempotency_key: str | None) -> None:
        """Submit a task for each body. If one is refused, those before it are cancelled. Raises `Problem`."""
        services = self._services
        card = [check_request(body, services.settings, services.store) for body in bodies][-1]
        self._stack.enter_context(stream_slot(services))
        choice = 0
        try:
            for number, body in enumerate(bodies):
                key = f"{idempotency_key}/{number}" if idempotency_key and number else idempotency_key
                submitted = services.submitter.submit(body, key, current_tenant(), card)
                snapshot = self._lookup.inspect(submitted.task_id)
                self._follow(Progress(snapshot, choice, submitted.replayed))
                choice += body.sampling_params.n
        except BaseException:
            self._cancel()
            raise

    def _follow(self, task: Progress) -> None:
        self.tasks.append(task)
        services = self._services
        lease = ReaderLease(services.readers, task.snapshot, request.environ, services.shutdown)
        self._leases.append(self._stack.enter_context(lease))

    def _cancel(self) -> None:
        for task in self.tasks:
            if task.replayed:
                continue
            with suppress(redis.RedisError):
                self._services.store.cancel(task.snapshot.task_id)

    def disconnected(self) -> None:
        """The server could not write to the client. Not every server offers a check for that."""
        for lease in self._leases:
            lease.disconnected = True

    def attach(self, snapshot: TaskSnapshot) -> None:
        """Follow a task that exists. Raises `Problem` (503)."""
        self._stack.enter_context(stream_slot(self._services))
        self._follow(Progress(snapshot, 0, replayed=True))

    def events(self) -> Iterator[list[Event]]:
        """The events of the first task from its beginning; an empty list at each tick without events."""
        task_id = self.tasks[0].snapshot.task_id
        return self._services.event_reader.batches(task_id, -1, stop=self._is_over)

    def deltas(self) -> Iterator[list[Delta]]:
        """What the tasks produce, one task after the other; an empty list at each tick without events.

        Raises `Problem` if a task fails, the server stops, or a task vanishes.
        """
        for task in self.tasks:
            yield from self._task_deltas(task)

    def _task_deltas(self, task: Progress) -> Iterator[list[Delta]]:
        task_id = task.snapshot.task_id
        for batch in self._services.event_reader.batches(task_id, -1, stop=self._is_over):
            task.num_tokens += sum(event.token is not None for event in batch)
            end = _end_of(batch)
            problem = to_problem(end) if end else None
            if problem:
                problem.headers[TASK_HEADER] = self.task_ids
                yield to_deltas([event for event in batch if event.token is not None], task.choice)
                raise problem
            if end:
                task.usage = dict(end.usage or {})
            yield to_deltas(batch, task.choice)
            if end:
                return
        raise self._why_over(task_id)

    def _is_over(self) -> bool:
        # Not `any` of a generator: each lease must be asked, because that renews it.
        return any([lease.is_over() for lease in self._leases])  # noqa: C419

    def _why_over(self, task_id: str) -> Problem:
        headers = {TASK_HEADER: self.task_ids}
        if any(lease.disconnected for lease in self._leases):
            return Problem(503, "client_disconnected", "the client has disconnected", headers=headers)
        if self._services.shutdown.requested:
            for lease in self._leases:
                lease.keep = True
            detail = "the server is stopping; send the request again"
            return Problem(503, "stopping", detail, retry_after=STOPPING_SECONDS, headers=headers)
        return Problem(500, "task_lost", f"task {task_id} no longer exists", headers=headers)

    def usage(self) -> dict[str, int]:
        """The sum of the tasks' token counts, as far as they are known."""
        total = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        for task in self.tasks:
            for name, value in (task.usage or self._partial_usage(task)).items():
                if name in total:
                    total[name] += value
        return total

    def _partial_usage(self, task: Progress) -> dict[str, int]:
        if task.prompt_tokens is None and task.num_tokens:
            with suppress(redis.RedisError):
                snapshot = self._services.store.inspect(task.snapshot.task_id)
                task.prompt_tokens = snapshot.prompt_tokens if snapshot else None
        return {"prompt_tokens": task.prompt_tokens or 0, "completion_tokens": task.num_tokens}

    def first_deltas(self, deltas: Iterator[list[Delta]], seconds: float) -> list[Delta]:
        """Wait up to `seconds` for the first deltas: a task that fails at once is then an error reply."""
        started = time.monotonic()
        for batch in deltas:
            if batch or time.monotonic() - started >= seconds:
                return batch
        return []


def _end_of(batch: list[Event]) -> FinishedEvent | None:
    """The event that ends the task, if it is in `batch`."""
    last = batch[-1] if batch else None
    return last if isinstance(last, FinishedEvent) and last.done else None
