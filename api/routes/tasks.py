"""The routes of tasks: submit, poll, follow, cancel.

Law: a reply is written from one consistent snapshot. Nothing here waits without a place among the waiting,
a limit in time, and an eye on whether the client is still there.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import redis
from flask import Response, request
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag

from api.authentication import SCHEME_NAME, tenant
from api.problems import Problem, bad_field, retry_seconds
from api.reply_slots import ReplySlots
from api.schemas.replies import PROBLEM_REPLY, Task
from api.schemas.requests import (
    MAX_WAIT_SECONDS,
    EventsHeaders,
    EventsQuery,
    SubmitHeaders,
    TaskBody,
    TaskPath,
    WaitQuery,
)
from api.schemas.task_view import TERMINAL, eta_seconds, task_url, view
from api.settings import ApiSettings
from api.streams import events
from api.streams.follow import LOG_PAGE, Follower
from api.streams.presence import Places, Shutdown, client_is_gone
from api.streams.visits import Visit
from api.submission import Submitter
from monitoring.http import HttpMetrics
from tokenmill.protocol import naming
from tokenmill.protocol.messages import Event
from tokenmill.protocol.snapshots import Reading, TaskSnapshot
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.script_errors import LOST_ERROR
from tokenmill.protocol.store.task_store import TaskStore

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
POLL_SECONDS = 1
LONGEST_POLL_SECONDS = 10
"""A task that waits long need not be asked for each second, but its start should be seen."""
BUSY_SECONDS = 5
WAIT_HEADER = "Tokenmill-Wait"
"""`skipped`: the call asked to wait, and all places for waiting calls were taken."""
_TAG = Tag(name="Tasks", description="Requests for text: submit, then poll or follow.")
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", re.IGNORECASE)
_STREAM: dict[str | int | HTTPStatus, Any] = {
    HTTPStatus.OK: {
        "description": "The events, replayed and then live.",
        "content": {"text/event-stream": {}},
    },
    HTTPStatus.NO_CONTENT: {"description": "The task has ended, and nothing is behind the given place."},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskServices:
    """What the routes work with."""

    settings: ApiSettings
    store: TaskStore
    readers: Readers
    submitter: Submitter
    follower: Follower
    places: Places
    reply_slots: ReplySlots
    metrics: HttpMetrics
    shutdown: Shutdown


def task_routes(services: TaskServices) -> APIBlueprint:
    """The blueprint of `/v1/tasks`."""
    calls = _Calls(services)
    routes = APIBlueprint(
        "tasks",
        __name__,
        url_prefix="/v1/tasks",
        abp_tags=[_TAG],
        abp_security=[{SCHEME_NAME: []}] if services.settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.post("", summary="Submit a task", responses={HTTPStatus.ACCEPTED: Task, HTTPStatus.OK: Task})
    def submit(header: SubmitHeaders, body: TaskBody) -> Response:
        """Accepted (202) also while no worker is up. With `Prefer: wait=n`: 200 if it ended in that time."""
        return calls.submit(header, body)

    @routes.get("/<task_id>", summary="Look at a task", responses={HTTPStatus.OK: Task})
    def poll(path: TaskPath, query: WaitQuery) -> Response:
        """What there is of it so far. 404: never heard of; 410: it ended too long ago."""
        return calls.poll(path.task_id, query.wait)

    @routes.get("/<task_id>/events", summary="Follow a task", responses=_STREAM)
    def follow(path: TaskPath, query: EventsQuery, header: EventsHeaders) -> Response:
        """Server-sent events: `token`, `end`, and last one `finished`; the `id` is the event's `seq`."""
        return calls.follow(path.task_id, _after(query, header))

    @routes.post("/<task_id>/cancel", summary="Cancel a task", responses={HTTPStatus.OK: Task})
    def cancel(path: TaskPath) -> Response:
        """Ends it where it stands. A task that has ended already is left as it was."""
        return calls.cancel(path.task_id)

    @routes.delete("/<task_id>", summary="Cancel a task", responses={HTTPStatus.OK: Task})
    def delete(path: TaskPath) -> Response:
        """The same as cancel: what was generated can still be read until it expires."""
        return calls.cancel(path.task_id)

    return routes


class _Calls:
    """What the routes do, one method for each."""

    def __init__(self, services: TaskServices) -> None:
        self._services = services

    def submit(self, header: SubmitHeaders, body: TaskBody) -> Response:
        submitted = self._services.submitter.submit(body, header.idempotency_key, tenant())
        seconds = preferred_wait(header.prefer)
        waited = self._wait(submitted.task_id, seconds)
        if not (seconds or submitted.replayed):
            # It is accepted, whatever else is in progress, and its log is short.
            response, finished = _reply(self._reading(submitted.task_id), HTTPStatus.ACCEPTED), False
        else:
            response, finished = self._submitted(submitted.task_id, seconds, waited=waited)
        response.headers["Location"] = task_url(submitted.task_id)
        if finished:
            response.headers["Preference-Applied"] = f"wait={seconds:.0f}"
        if submitted.replayed:
            response.headers["Idempotent-Replayed"] = "true"
        return response

    def _submitted(self, task_id: str, seconds: float, *, waited: bool) -> tuple[Response, bool]:
        """The reply, and whether the task has ended in the time for which the call was to wait."""
        with self._services.reply_slots.take(tenant()):
            reading = self._reading(task_id)
            finished = seconds > 0 and reading.snapshot.status in TERMINAL
            status = HTTPStatus.OK if finished else HTTPStatus.ACCEPTED
            return _reply(reading, status, waited=waited), finished

    def poll(self, task_id: str, seconds: float) -> Response:
        waited = self._wait(task_id, min(seconds, MAX_WAIT_SECONDS))
        with self._services.reply_slots.take(tenant()):
            return _reply(self._reading(task_id), waited=waited)

    def cancel(self, task_id: str) -> Response:
        # First whose it is, which never changes.
        self._look(self._services.store.inspect, task_id)
        self._services.store.cancel(task_id)
        with self._services.reply_slots.take(tenant()):
            return _reply(self._reading(task_id))

    def follow(self, task_id: str, after: int) -> Response:
        snapshot = self._look(self._services.store.inspect, task_id)
        if snapshot.status in TERMINAL:
            return self._replay(task_id, after)
        if request.method == "HEAD":
            # Its body is never begun, so nothing would ever give the place back.
            return _stream_reply([])
        return self._live(snapshot, after)

    def _replay(self, task_id: str, after: int) -> Response:
        """The events of a task that has ended. 204 tells an event source not to come again."""
        services = self._services
        page = services.store.read_log(task_id, after, LOG_PAGE)
        if not page:
            return Response(status=HTTPStatus.NO_CONTENT)
        if request.method == "HEAD":
            return _stream_reply([])
        environ = request.environ

        def is_over() -> bool:
            return services.shutdown.requested or client_is_gone(environ)

        with self._place() as stack:
            response = _stream_reply(_replayed(services.store, task_id, page, is_over))
            response.call_on_close(stack.pop_all().close)
        return response

    def _live(self, snapshot: TaskSnapshot, after: int) -> Response:
        services = self._services
        with self._place() as stack:
            visit = stack.enter_context(self._visit(snapshot))
            batches = services.follower.batches(snapshot.task_id, after, stop=visit.is_over)
            heartbeat = services.settings.heartbeat_seconds
            response = _stream_reply(_frames(batches, heartbeat, services.shutdown, visit))
            # Not in the generator: one that is never started runs no clean-up.
            response.call_on_close(stack.pop_all().close)
        return response

    @contextmanager
    def _place(self) -> Iterator[ExitStack]:
        """A place for a stream, held until the stack is closed. Raises `Problem` (503)."""
        services = self._services
        with ExitStack() as stack:
            if not stack.enter_context(services.places.take(tenant())):
                detail = "as many streams are open as this process may have; try again, or poll"
                raise Problem(503, "too_many_streams", detail, retry_after=BUSY_SECONDS)
            services.metrics.stream_opened()
            stack.callback(services.metrics.stream_closed)
            yield stack

    def _wait(self, task_id: str, seconds: float) -> bool:
        """Until the task has ended, at most for `seconds`. False: no place was free, so it did not wait.

        What comes meanwhile is read as it comes; the log as a whole is read once, for the reply.
        """
        if seconds <= 0:
            return True
        services = self._services
        snapshot = self._look(services.store.inspect, task_id)
        if snapshot.status in TERMINAL:
            return True
        with services.places.take(tenant()) as taken:
            if taken:
                with self._visit(snapshot) as visit:
                    last = snapshot.num_entries - 1
                    services.follower.wait_for_end(task_id, last, seconds, stop=visit.is_over)
        return taken

    def _visit(self, snapshot: TaskSnapshot) -> Visit:
        services = self._services
        return Visit(services.readers, snapshot, request.environ, services.shutdown)

    def _reading(self, task_id: str) -> Reading:
        return self._look(self._services.store.read, task_id)

    def _look(self, look: Callable[[str, str | None], Found | None], task_id: str) -> Found:
        """Raises `Problem`: 404 or 410. Another tenant's task is answered as one that never was."""
        known = naming.TASK_ID.fullmatch(task_id)
        whose = tenant() if self._services.settings.keyring else None
        found = look(task_id, whose) if known else None
        if found is not None:
            return found
        oldest = time.time() - self._services.settings.retention_seconds
        if known and naming.EARLIEST_TASK_TIME <= naming.task_id_time(task_id) < oldest:
            raise Problem(410, "task_expired", "this task ended too long ago; it is no longer kept")
        if known and self._services.store.is_lost(task_id, whose):
            raise Problem(404, "lost", LOST_ERROR.message, param="task_id")
        raise Problem(404, "task_not_found", "there is no such task", param="task_id")


def preferred_wait(prefer: str | None) -> float:
    """The seconds of `Prefer: wait=n` (RFC 7240), at most what is allowed; anything else is ignored."""
    found = _WAIT.search(prefer or "")
    return min(float(found[1]), MAX_WAIT_SECONDS) if found else 0.0


def _after(query: EventsQuery, header: EventsHeaders) -> int:
    """Where the client stopped. A source that reconnects repeats its URL, so the header is the newer one."""
    last = header.last_event_id
    if not last:
        return -1 if query.after is None else query.after
    if not re.fullmatch(r"-1|[0-9]{1,18}", last):
        raise bad_field("Last-Event-ID", "must be the `id` of an event of this stream")
    return int(last)


def _replayed(
    store: TaskStore, task_id: str, page: list[Event], is_over: Callable[[], bool]
) -> Iterator[bytes]:
    """The log from `page` on. A client reads it as slowly as it likes: one page is held at a time."""
    try:
        while page:
            yield events.frames(page)
            if len(page) < LOG_PAGE or is_over():
                return
            page = store.read_log(task_id, page[-1].seq, LOG_PAGE)
    except redis.RedisError as error:
        # Without its last event the stream is not complete: the client comes back for the rest.
        logger.warning("task %s: a replay ends early: %s", task_id, error)


def _frames(
    batches: Iterator[list[Event]], heartbeat: float, shutdown: Shutdown, visit: Visit
) -> Iterator[bytes]:
    try:
        yield events.RETRY
        yield from _live_frames(batches, heartbeat)
        if shutdown.requested:
            visit.cut_short = True
            yield events.GOODBYE
    except GeneratorExit:
        # A server gives a stream up when it cannot write to its client; some show no socket to look at.
        visit.gone = True
        raise


def _live_frames(batches: Iterator[list[Event]], heartbeat: float) -> Iterator[bytes]:
    last_sent = time.monotonic()
    for batch in batches:
        if batch:
            yield events.frames(batch)
        elif time.monotonic() - last_sent >= heartbeat:
            yield events.HEARTBEAT
        else:
            continue
        last_sent = time.monotonic()


def _stream_reply(chunks: Iterator[bytes] | list[bytes]) -> Response:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(chunks, content_type="text/event-stream; charset=utf-8", headers=headers)


def _reply(reading: Reading, status: HTTPStatus = HTTPStatus.OK, *, waited: bool = True) -> Response:
    snapshot = reading.snapshot
    response = Response(view(reading).model_dump_json(), status, content_type="application/json")
    response.headers["Cache-Control"] = "no-store"
    if snapshot.status not in TERMINAL:
        pause = min(eta_seconds(snapshot) or POLL_SECONDS, LONGEST_POLL_SECONDS)
        response.headers["Retry-After"] = str(retry_seconds(pause))
        if not waited:
            response.headers[WAIT_HEADER] = "skipped"
            response.headers["Retry-After"] = str(BUSY_SECONDS)
    return response
