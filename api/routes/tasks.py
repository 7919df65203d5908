"""The routes of tasks: submit, poll, follow, cancel.

Invariants: a reply is built from one consistent snapshot. A call that waits occupies a slot, has a time limit
and notices when its client disconnects.
"""

import re
from contextlib import nullcontext
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from flask import Response, request
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag

from api.authentication import SCHEME_NAME, current_tenant
from api.problems import bad_field, retry_seconds
from api.request_checks import check_request
from api.routes.event_streams import EventStreams
from api.routes.slots import BUSY_SECONDS, reply_slot
from api.routes.task_list import task_list
from api.routes.task_lookup import TaskLookup
from api.routes.task_services import TaskServices
from api.schemas.replies import PROBLEM_REPLY, Task, TaskList
from api.schemas.requests import (
    MAX_WAIT_SECONDS,
    EventsHeaders,
    EventsQuery,
    ListQuery,
    SubmitHeaders,
    TaskBody,
    TaskPath,
    TaskQuery,
)
from api.schemas.task_view import TERMINAL, eta_seconds, task_url, view
from api.streams.reader_lease import ReaderLease
from api.submission import parse_idempotency_key
from tokenmill.protocol.messages import GenerateRequest
from tokenmill.protocol.snapshots import Reading

POLL_SECONDS = 1
MAX_POLL_SECONDS = 10
"""Bounds of Retry-After for a task that has not ended, so that clients see it start."""
WAIT_HEADER = "Tokenmill-Wait"
"""`skipped`: the call asked to wait, but no slot for waiting calls was free."""
_TAG = Tag(name="Tasks", description="Submit a request for text, then poll it or follow its tokens.")
_DELETED: dict[str | int | HTTPStatus, Any] = {
    HTTPStatus.OK: Task,
    HTTPStatus.NO_CONTENT: {"description": "The task had ended and is deleted."},
}
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", re.IGNORECASE)
_STREAM: dict[str | int | HTTPStatus, Any] = {
    HTTPStatus.OK: {
        "description": "The past events, then the live ones.",
        "content": {"text/event-stream": {}},
    },
    HTTPStatus.NO_CONTENT: {"description": "The task has ended and has no event after the given one."},
}


# Longer than usual: one short handler for each route, whose docstring OpenAPI shows.
def task_routes(services: TaskServices) -> APIBlueprint:
    """The blueprint of `/v1/tasks`."""
    lookup = TaskLookup(services.settings, services.store)
    tasks, streams = _Tasks(services, lookup), EventStreams(services, lookup)
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
        """Queues the task, even while no worker is running, and returns 202.

        With `Prefer: wait=n` the status is 200 if the task ended within n seconds.
        """
        return tasks.submit(header, body)

    @routes.get("", summary="List tasks", responses={HTTPStatus.OK: TaskList})
    def list_tasks(query: ListQuery) -> Response:
        """The tasks of the caller, newest first, until they expire.

        `metadata.KEY=VALUE` keeps those whose metadata have this member.
        """
        return task_list(services.store, query)

    @routes.get("/<task_id>", summary="Get a task", responses={HTTPStatus.OK: Task})
    def poll(path: TaskPath, query: TaskQuery) -> Response:
        """Returns the task with the output so far. 404: unknown task; 410: the task ended too long ago."""
        return tasks.poll(path.task_id, query.wait, with_request=query.include == "prompt")

    @routes.get("/<task_id>/events", summary="Follow a task", responses=_STREAM)
    def follow(path: TaskPath, query: EventsQuery, header: EventsHeaders) -> Response:
        """Server-sent events: `token`, `end` of one output, and `finished` as the last.

        The `id` of each is the event's `seq`.
        """
        return streams.follow(path.task_id, _after(query, header))

    @routes.post("/<task_id>/cancel", summary="Cancel a task", responses={HTTPStatus.OK: Task})
    def cancel(path: TaskPath) -> Response:
        """Ends the task and keeps its output so far. A task that has ended is not changed."""
        return tasks.cancel(path.task_id)

    @routes.delete("/<task_id>", summary="Cancel or delete a task", responses=_DELETED)
    def delete(path: TaskPath) -> Response:
        """Cancels a task that has not ended, and returns it: it can be read until it expires.

        Deletes one that has ended, with its prompt, output and undelivered webhook.
        """
        return tasks.delete(path.task_id)

    return routes


class _Tasks:
    """The handlers of `task_routes`, except for event streams."""

    def __init__(self, services: TaskServices, lookup: TaskLookup) -> None:
        self._services = services
        self._lookup = lookup

    def submit(self, header: SubmitHeaders, body: TaskBody) -> Response:
        """By now `authentication` has checked the API key, `json_body` has parsed the body, and `TaskBody`
        has checked its fields.
        """
        services = self._services
        key = parse_idempotency_key(header.idempotency_key)
        wait_seconds = preferred_wait(header.prefer)
        card = check_request(body, services.settings, services.store)
        submitted = services.submitter.submit(body, key, current_tenant(), card)
        waited = self._wait(submitted.task_id, wait_seconds)
        # The log of a new task is short, so its reply takes no slot and is never refused.
        may_be_long = wait_seconds > 0 or submitted.replayed
        with reply_slot(self._services) if may_be_long else nullcontext():
            reading = self._lookup.read(submitted.task_id)
            has_ended = wait_seconds > 0 and reading.snapshot.status in TERMINAL
            status = HTTPStatus.OK if has_ended else HTTPStatus.ACCEPTED
            response = _task_reply(reading, status, waited=waited)
        response.headers["Location"] = task_url(submitted.task_id)
        if has_ended:
            response.headers["Preference-Applied"] = f"wait={wait_seconds:.0f}"
        if submitted.replayed:
            response.headers["Idempotent-Replayed"] = "true"
        return response

    def poll(self, task_id: str, wait_seconds: float, *, with_request: bool = False) -> Response:
        waited = self._wait(task_id, min(wait_seconds, MAX_WAIT_SECONDS))
        with reply_slot(self._services):
            reading = self._lookup.read(task_id)
            submitted = self._services.store.request(task_id) if with_request else None
            return _task_reply(reading, waited=waited, submitted=submitted)

    def cancel(self, task_id: str) -> Response:
        # Raises for a task of another tenant.
        self._lookup.inspect(task_id)
        self._services.store.cancel(task_id)
        with reply_slot(self._services):
            return _task_reply(self._lookup.read(task_id))

    def delete(self, task_id: str) -> Response:
        # Raises for a task of another tenant.
        snapshot = self._lookup.inspect(task_id)
        if snapshot.status not in TERMINAL or self._services.store.erase(task_id) is False:
            return self.cancel(task_id)
        return Response(status=HTTPStatus.NO_CONTENT)

    def _wait(self, task_id: str, seconds: float) -> bool:
        """Wait until the task has ended, for at most `seconds`. False: no slot was free, so it did not wait.

        Only new events are read meanwhile; the reply reads the whole log once.
        """
        if seconds <= 0:
            return True
        services = self._services
        snapshot = self._lookup.inspect(task_id)
        if snapshot.status in TERMINAL:
            return True
        with services.stream_slots.acquire(current_tenant()) as acquired:
            if acquired:
                with ReaderLease(services.readers, snapshot, request.environ, services.shutdown) as lease:
                    last = snapshot.num_entries - 1
                    services.event_reader.wait_for_end(task_id, last, seconds, stop=lease.is_over)
        return acquired


def preferred_wait(prefer: str | None) -> float:
    """The seconds of `Prefer: wait=n`, at most `MAX_WAIT_SECONDS`.

    0 for anything else: RFC 7240 has servers ignore preferences that they do not understand, so a value such
    as `wait=abc` is no error.
    """
    found = _WAIT.search(prefer or "")
    return min(float(found[1]), MAX_WAIT_SECONDS) if found else 0.0


def _after(query: EventsQuery, header: EventsHeaders) -> int:
    """The `seq` of the last event that the client has. A reconnecting EventSource repeats its URL, so the
    header is newer than the query.
    """
    last = header.last_event_id
    if not last:
        return -1 if query.after is None else query.after
    if not re.fullmatch(r"-1|[0-9]{1,18}", last):
        raise bad_field("Last-Event-ID", "must be the `id` of an event of this stream")
    return int(last)


def _task_reply(
    reading: Reading,
    status: HTTPStatus = HTTPStatus.OK,
    *,
    waited: bool = True,
    submitted: GenerateRequest | None = None,
) -> Response:
    snapshot, task = reading.snapshot, view(reading)
    if submitted is not None:
        task = task.model_copy(update={"request": _set_fields(submitted)})
    response = Response(task.model_dump_json(), status, content_type="application/json")
    response.headers["Cache-Control"] = "no-store"
    if snapshot.status not in TERMINAL:
        pause = min(eta_seconds(snapshot) or POLL_SECONDS, MAX_POLL_SECONDS)
        response.headers["Retry-After"] = str(retry_seconds(pause))
        if not waited:
            response.headers[WAIT_HEADER] = "skipped"
            response.headers["Retry-After"] = str(BUSY_SECONDS)
    return response


def _set_fields(submitted: GenerateRequest) -> dict[str, Any]:
    """The members of a body that the submission had set."""
    fields = asdict(submitted)
    del fields["id"]
    fields.update(fields.pop("sampling", None) or {})
    return {name: value for name, value in fields.items() if value is not None}
