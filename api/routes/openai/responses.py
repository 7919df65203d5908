"""The routes of `/v1/responses`: submit, read, follow, cancel. A response is a task under another name."""

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from flask import Response, request
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, Field

from api.authentication import SCHEME_NAME, current_tenant
from api.problems import Problem, bad_field
from api.request_checks import check_request
from api.routes.openai.completion_call import TASK_HEADER, CompletionCall
from api.routes.openai.completions import TAG
from api.routes.openai.input_items import InputItemsQuery, input_page
from api.routes.openai.response_view import (
    ID_PREFIX,
    first_events,
    frame,
    item_events,
    last_event,
    new_items,
    response_of,
)
from api.routes.slots import stream_reply
from api.routes.task_lookup import TaskLookup
from api.routes.task_services import TaskServices
from api.schemas.openai.response_items import read_items, to_turns
from api.schemas.openai.response_replies import DeletedResponse, InputItemList, ResponseView
from api.schemas.openai.responses import ResponseBody, split_instructions
from api.schemas.replies import PROBLEM_REPLY
from api.schemas.requests import SubmitHeaders
from api.streams import sse
from api.submission import parse_idempotency_key
from tokenmill.protocol.messages import FinishedEvent, GenerateRequest

_REPLY: dict[Any, Any] = {200: ResponseView}
_ITEMS: dict[Any, Any] = {200: InputItemList}
_DELETED: dict[Any, Any] = {200: DeletedResponse}


class ResponsePath(BaseModel):
    """The response."""

    response_id: str = Field(description="`resp_` and the id of its task.")


class ResponseQuery(BaseModel):
    """Whether and where to follow the response."""

    stream: bool = Field(False, description="Return the events of the response.")
    starting_after: int = Field(-1, description="Start after the event with this `sequence_number`.")


def response_routes(services: TaskServices) -> APIBlueprint:
    """The blueprint of `/v1/responses`."""
    responses = _Responses(services)
    routes = APIBlueprint(
        "responses",
        __name__,
        url_prefix="/v1/responses",
        abp_tags=[TAG],
        abp_security=[{SCHEME_NAME: []}] if services.settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.post("", summary="Create a response", responses=_REPLY)
    def create(header: SubmitHeaders, body: ResponseBody) -> Response:
        """With `background: true` the reply comes at once, and the response is read or followed later."""
        return responses.create(header, body)

    @routes.get("/<response_id>", summary="Get a response", responses=_REPLY)
    def retrieve(path: ResponsePath, query: ResponseQuery) -> Response:
        """With `stream=true`: its events after `starting_after`, the past ones first."""
        if query.stream:
            return responses.follow(path.response_id, query.starting_after)
        return responses.retrieve(path.response_id)

    @routes.get("/<response_id>/input_items", summary="List the input of a response", responses=_ITEMS)
    def list_input(path: ResponsePath, query: InputItemsQuery) -> Response:
        """The chat that the response continues, without the instructions."""
        return responses.list_input(path.response_id, query)

    @routes.post("/<response_id>/cancel", summary="Cancel a response", responses=_REPLY)
    def cancel(path: ResponsePath) -> Response:
        """Ends the response and keeps its output so far."""
        return responses.cancel(path.response_id)

    @routes.delete("/<response_id>", summary="Delete a response", responses=_DELETED)
    def delete(path: ResponsePath) -> Response:
        """Deletes its input and output. One that has not ended is cancelled first."""
        return responses.delete(path.response_id)

    return routes


class _Responses:
    """The handlers of `response_routes`."""

    def __init__(self, services: TaskServices) -> None:
        self._services = services
        self._lookup = TaskLookup(services.settings, services.store)

    def create(self, header: SubmitHeaders, body: ResponseBody) -> Response:
        key = parse_idempotency_key(header.idempotency_key)
        continues = bool(body.background) or key is not None
        history = self._history(body.previous_response_id) if body.previous_response_id else []
        task = body.to_task("continue" if continues else "cancel", history)
        if body.background and not body.stream:
            card = check_request(task, self._services.settings, self._services.store)
            submitted = self._services.submitter.submit(task, key, current_tenant(), card)
            return self._shown(submitted.task_id)
        call = CompletionCall(self._services, self._lookup)
        try:
            call.submit([task], key)
            return self._stream(call, -1) if body.stream else self._whole(call)
        except BaseException:
            call.close()
            raise

    def retrieve(self, response_id: str) -> Response:
        return self._shown(_task_id(response_id))

    def list_input(self, response_id: str, query: InputItemsQuery) -> Response:
        task_id = _task_id(response_id)
        # Raises for a task of another tenant.
        self._lookup.inspect(task_id)
        page = input_page(task_id, self._request(task_id).messages or (), query)
        return Response(json.dumps(page, ensure_ascii=False), content_type="application/json")

    def cancel(self, response_id: str) -> Response:
        task_id = _task_id(response_id)
        self._lookup.inspect(task_id)
        self._services.store.cancel(task_id)
        return self._shown(task_id)

    def delete(self, response_id: str) -> Response:
        task_id = _task_id(response_id)
        # Raises for a task of another tenant.
        self._lookup.inspect(task_id)
        self._services.store.cancel(task_id)
        self._services.store.erase(task_id)
        deleted = {"id": response_id, "object": "response", "deleted": True}
        return Response(json.dumps(deleted), content_type="application/json")

    def follow(self, response_id: str, after: int) -> Response:
        snapshot = self._lookup.inspect(_task_id(response_id))
        if request.method == "HEAD":
            # The body of a reply to HEAD is never iterated, so nothing would release a slot.
            return stream_reply([])
        call = CompletionCall(self._services, self._lookup)
        try:
            call.attach(snapshot)
            return self._stream(call, after)
        except BaseException:
            call.close()
            raise

    def _history(self, response_id: str) -> list[dict[str, Any]]:
        """The messages of a completed response without its instructions, and its answer."""
        task_id = _task_id(response_id)
        reading = self._lookup.read(task_id)
        asked = self._request(task_id)
        if reading.snapshot.status != "completed" or asked.messages is None:
            raise bad_field("previous_response_id", "must be a completed response")
        messages = [dict(one) for one in split_instructions(asked.messages)[1]]
        items = response_of(reading, asked, self._services.tool_format())["output"]
        return [*messages, *to_turns(read_items(items))]

    def _whole(self, call: CompletionCall) -> Response:
        """Wait for the end. Raises `Problem` if the task fails."""
        for _ in call.deltas():
            pass
        response = self._shown(call.tasks[0].snapshot.task_id)
        call.close()
        return response

    def _stream(self, call: CompletionCall, after: int) -> Response:
        task_id = call.tasks[0].snapshot.task_id
        response = self._view(task_id)
        frames = self._frames(call, response, after)
        reply = stream_reply(frames)
        reply.headers[TASK_HEADER] = task_id
        reply.call_on_close(call.close)
        return reply

    def _frames(self, call: CompletionCall, response: dict[str, Any], after: int) -> Iterator[bytes]:
        """The events after the sequence number `after`, and comments while there are none."""
        heartbeat, last_sent = self._services.settings.heartbeat_seconds, time.monotonic()
        numbers = count()
        try:
            for event in self._events(call, response):
                number = -1 if event is None else next(numbers)
                if event is not None and number > after:
                    yield frame(number, event)
                elif event is None and time.monotonic() - last_sent >= heartbeat:
                    yield sse.HEARTBEAT
                else:
                    continue
                last_sent = time.monotonic()
        except GeneratorExit:
            call.disconnected()
            raise

    def _events(self, call: CompletionCall, response: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """All events of the response; None at each tick without events."""
        *first, running = first_events(response)
        yield from first
        items = None
        for batch in call.events():
            if not batch:
                yield None
                continue
            if items is None:
                yield running
                # Not before: the worker that runs the task has published the format of the model.
                task_id = batch[0].id
                items = new_items(task_id, self._request(task_id), self._services.tool_format())
            for event in batch:
                yield from item_events(items, event)
                if isinstance(event, FinishedEvent) and event.done:
                    yield last_event(self._view(event.id))

    def _shown(self, task_id: str) -> Response:
        response = self._view(task_id)
        reply = Response(json.dumps(response, ensure_ascii=False), content_type="application/json")
        reply.headers[TASK_HEADER] = task_id
        return reply

    def _view(self, task_id: str) -> dict[str, Any]:
        return response_of(self._lookup.read(task_id), self._request(task_id), self._services.tool_format())

    def _request(self, task_id: str) -> GenerateRequest:
        request = self._services.store.request(task_id)
        if request is None:
            raise Problem(404, "task_not_found", "there is no such response", param="response_id")
        return request


def _task_id(response_id: str) -> str:
    return response_id.removeprefix(ID_PREFIX)
