"""The routes of a worker's steps: follow them live, or export them as a trace."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

from flask import Response, request
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag

from api.authentication import SCHEME_NAME, current_tenant
from api.problems import Problem, bad_field
from api.routes.slots import reply_slot, stream_reply, stream_slot
from api.routes.task_services import TaskServices
from api.schemas.replies import PROBLEM_REPLY
from api.schemas.steps import StepsHeaders, StepsQuery, Trace, WorkerPath
from api.shutdown import Shutdown
from api.streams import sse
from api.streams.reader_lease import client_disconnected
from api.streams.step_feeds import EntryId, StepEntry, StepFeed
from api.streams.step_trace import trace_of
from tokenmill.protocol import naming, steps

TICK_SECONDS = 1.0
CACHED_FRAMES = 256
"""Frames kept for other clients of the same tenant."""
_TAG = Tag(name="Workers", description="What the workers compute.")
_STREAM: dict[str | int | HTTPStatus, Any] = {
    HTTPStatus.OK: {
        "description": "Past steps, then the live ones.",
        "content": {"text/event-stream": {}},
    }
}
_TRACE: dict[str | int | HTTPStatus, Any] = {
    HTTPStatus.OK: Trace,
}


def step_routes(services: TaskServices) -> APIBlueprint:
    """The blueprint of `/v1/workers/{name}`."""
    routes = APIBlueprint(
        "steps",
        __name__,
        url_prefix="/v1/workers",
        abp_tags=[_TAG],
        abp_security=[{SCHEME_NAME: []}] if services.settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.get("/<name>/steps", summary="Follow the steps of a worker", responses=_STREAM)
    def follow(path: WorkerPath, query: StepsQuery, header: StepsHeaders) -> Response:
        """Server-sent events `step`. The tasks of other tenants are shown without their ids.

        Every step is recorded while a client follows, and one per second otherwise. A client that is too
        slow skips steps.
        """
        return _follow(services, path.name, query.last, header.last_event_id or query.after)

    @routes.get("/<name>/trace", summary="Export the steps of a worker", responses=_TRACE)
    def trace(path: WorkerPath) -> Response:
        """The recorded steps in the Trace Event Format, which Perfetto and `chrome://tracing` open."""
        _check_exists(services, path.name)
        with reply_slot(services):
            entries = services.store.read_steps(path.name)
            tenant = naming.tenant_hash(current_tenant())
            body = json.dumps(trace_of(steps.decode(entry, tenant) for entry in entries))
        return Response(body, content_type="application/json")

    return routes


def _follow(services: TaskServices, name: str, last: int, after: str | None) -> Response:
    start = _parse(after) if after else None
    _check_exists(services, name)
    if request.method == "HEAD":
        return stream_reply([])
    environ, shutdown = request.environ, services.shutdown

    def is_over() -> bool:
        return shutdown.requested or client_disconnected(environ)

    tenant = naming.tenant_hash(current_tenant())
    with ExitStack() as stack:
        stack.enter_context(stream_slot(services))
        feed = stack.enter_context(services.step_feeds.follow(name))
        batches = _batches(feed, start, last, is_over)
        heartbeat = services.settings.heartbeat_seconds
        response = stream_reply(_frames(batches, tenant, heartbeat, shutdown))
        response.call_on_close(stack.pop_all().close)
    return response


def _check_exists(services: TaskServices, name: str) -> None:
    """Raises `Problem` (404)."""
    if not services.store.has_steps(name, services.settings.slug):
        raise Problem(404, "worker_not_found", f"there is no worker {name} of this model")


def _parse(after: str) -> EntryId:
    try:
        return EntryId.parse(after)
    except ValueError:
        raise bad_field("after", "must be the `id` of an event of this stream") from None


def _batches(
    feed: StepFeed, after: EntryId | None, last: int, is_over: Callable[[], bool]
) -> Iterator[list[StepEntry]]:
    """The steps in batches, and an empty batch for each tick without one."""
    while not is_over():
        if after is None:
            after = feed.start_of(last, TICK_SECONDS)
            entries: list[StepEntry] = []
        else:
            entries = feed.wait(after, TICK_SECONDS)
        if entries:
            after = entries[-1].id
        yield entries


def _frames(
    batches: Iterator[list[StepEntry]], tenant: str, heartbeat: float, shutdown: Shutdown
) -> Iterator[bytes]:
    """`heartbeat`: seconds without a byte after which a comment is sent."""
    yield sse.RETRY
    last_sent = time.monotonic()
    for batch in batches:
        if batch:
            yield b"".join(_frame(entry, tenant) for entry in batch)
        elif time.monotonic() - last_sent >= heartbeat:
            yield sse.HEARTBEAT
        else:
            continue
        last_sent = time.monotonic()
    if shutdown.requested:
        yield sse.SHUTDOWN_COMMENT


@functools.lru_cache(CACHED_FRAMES)
def _frame(entry: StepEntry, tenant: str) -> bytes:
    data = json.dumps(steps.decode(entry.data, tenant), separators=(",", ":"))
    return f"id: {entry.id}\nevent: step\ndata: {data}\n\n".encode()
