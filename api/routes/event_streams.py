"""Streams the events of a task: `GET /v1/tasks/{task_id}/events`."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus

import redis
import structlog
from flask import Response, request

from api.routes.slots import stream_reply, stream_slot
from api.routes.task_lookup import TaskLookup
from api.routes.task_services import TaskServices
from api.schemas.task_view import TERMINAL
from api.shutdown import Shutdown
from api.streams import sse
from api.streams.reader_lease import ReaderLease, client_disconnected
from api.streams.task_events import LOG_PAGE
from tokenmill.protocol.messages import Event, ProtocolError
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.task_store import TaskStore

_log = structlog.get_logger(__name__)


class EventStreams:
    """Live streams of running tasks, and replays of tasks that have ended. Both occupy a stream slot."""

    def __init__(self, services: TaskServices, lookup: TaskLookup) -> None:
        self._services = services
        self._lookup = lookup

    def follow(self, task_id: str, after: int) -> Response:
        """The events whose `seq` is greater than `after`."""
        snapshot = self._lookup.inspect(task_id)
        if snapshot.status in TERMINAL:
            return self._replay(task_id, after)
        if request.method == "HEAD":
            # The body of a reply to HEAD is never iterated, so nothing would release a slot.
            return stream_reply([])
        return self._live(snapshot, after)

    def _replay(self, task_id: str, after: int) -> Response:
        """The log of an ended task. Without events the status is 204, which stops an EventSource."""
        services = self._services
        page = services.store.read_log(task_id, after, LOG_PAGE)
        if not page:
            return Response(status=HTTPStatus.NO_CONTENT)
        if request.method == "HEAD":
            return stream_reply([])
        environ = request.environ

        def stop() -> bool:
            return services.shutdown.requested or client_disconnected(environ)

        with ExitStack() as stack:
            stack.enter_context(stream_slot(services))
            response = stream_reply(_replayed_frames(services.store, task_id, page, stop))
            response.call_on_close(stack.pop_all().close)
        return response

    def _live(self, snapshot: TaskSnapshot, after: int) -> Response:
        services = self._services
        with ExitStack() as stack:
            stack.enter_context(stream_slot(services))
            lease = ReaderLease(services.readers, snapshot, request.environ, services.shutdown)
            stack.enter_context(lease)
            batches = services.event_reader.batches(snapshot.task_id, after, stop=lease.is_over)
            heartbeat = services.settings.heartbeat_seconds
            response = stream_reply(
                _live_frames(snapshot.task_id, batches, heartbeat, services.shutdown, lease)
            )
            response.call_on_close(stack.pop_all().close)
        return response


def _replayed_frames(
    store: TaskStore, task_id: str, page: list[Event], stop: Callable[[], bool]
) -> Iterator[bytes]:
    """The log from `page` on. However slowly the client reads, one page is held at a time."""
    try:
        while page:
            yield sse.frames(page)
            if len(page) < LOG_PAGE or stop():
                return
            page = store.read_log(task_id, page[-1].seq, LOG_PAGE)
    except redis.RedisError as error:
        # The stream ends without its `finished` event, so the client reconnects for the rest.
        _log.warning("a replay was cut short", task=task_id, error=str(error))


def _live_frames(
    task_id: str, batches: Iterator[list[Event]], heartbeat: float, shutdown: Shutdown, lease: ReaderLease
) -> Iterator[bytes]:
    """`heartbeat`: seconds without a byte after which a comment is sent."""
    try:
        yield sse.RETRY
        last_sent = time.monotonic()
        for batch in batches:
            if batch:
                yield sse.frames(batch)
            elif time.monotonic() - last_sent >= heartbeat:
                yield sse.HEARTBEAT
            else:
                continue
            last_sent = time.monotonic()
        if shutdown.requested:
            lease.keep = True
            yield sse.SHUTDOWN_COMMENT
    except (redis.RedisError, ProtocolError) as error:
        _log.error("the events of a task cannot be read", task=task_id, error=str(error))
        yield sse.DAMAGED
    except GeneratorExit:
        # The server closes a stream that it cannot write. Not every server offers a check for the client.
        lease.disconnected = True
        raise
