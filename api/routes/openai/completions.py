"""The routes `/v1/chat/completions` and `/v1/completions`."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag

from api import problems
from api.authentication import SCHEME_NAME
from api.problems import Problem
from api.routes.openai.completion_call import TASK_HEADER, CompletionCall
from api.routes.openai.deltas import Delta
from api.routes.openai.whole_reply import (
    Format,
    chat_format,
    common_members,
    text_format,
    usage_view,
    whole_reply,
)
from api.routes.slots import reply_slot, stream_reply
from api.routes.task_lookup import TaskLookup
from api.routes.task_services import TaskServices
from api.schemas.openai.chat import ChatCompletionBody
from api.schemas.openai.replies import ChatCompletion, Completion
from api.schemas.openai.shared import CompletionFields
from api.schemas.openai.text import CompletionBody
from api.schemas.replies import PROBLEM_REPLY
from api.schemas.requests import SubmitHeaders, TaskBody
from api.streams import sse
from api.submission import parse_idempotency_key

TAG = Tag(name="OpenAI-compatible", description="The routes of OpenAI's API, on the same tasks.")
_DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def completion_routes(services: TaskServices) -> APIBlueprint:
    """The blueprint of both routes."""
    completions = _Completions(services)
    routes = APIBlueprint(
        "completions",
        __name__,
        url_prefix="/v1",
        abp_tags=[TAG],
        abp_security=[{SCHEME_NAME: []}] if services.settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.post("/chat/completions", summary="Continue a chat", responses={200: ChatCompletion})
    def chat(header: SubmitHeaders, body: ChatCompletionBody) -> Response:
        """Returns the answer, or streams it with `stream: true`.

        The task is cancelled when the client disconnects. With an `Idempotency-Key` it continues, and a retry
        with the same key and body returns its answer.
        """
        return completions.chat(header, body)

    @routes.post("/completions", summary="Continue a text", responses={200: Completion})
    def complete(header: SubmitHeaders, body: CompletionBody) -> Response:
        """The same for a text, or for several."""
        return completions.complete(header, body)

    return routes


class _Completions:
    """The handlers of `completion_routes`."""

    def __init__(self, services: TaskServices) -> None:
        self._services = services
        self._lookup = TaskLookup(services.settings, services.store)

    def chat(self, header: SubmitHeaders, body: ChatCompletionBody) -> Response:
        key = parse_idempotency_key(header.idempotency_key)
        call = self._submit([body.to_task(_on_disconnect(key))], key)
        style = chat_format(body, call.tasks[0].snapshot.task_id, self._services.tool_format)
        return self._reply(call, body, style)

    def complete(self, header: SubmitHeaders, body: CompletionBody) -> Response:
        key = parse_idempotency_key(header.idempotency_key)
        call = self._submit(body.to_tasks(_on_disconnect(key)), key)
        return self._reply(call, body, text_format(body))

    def _submit(self, tasks: Sequence[TaskBody], key: str | None) -> CompletionCall:
        call = CompletionCall(self._services, self._lookup)
        try:
            call.submit(tasks, key)
        except BaseException:
            call.close()
            raise
        return call

    def _reply(self, call: CompletionCall, body: CompletionFields, style: Format) -> Response:
        """Closes `call`, or has the response close it when its stream ends."""
        envelope = _Envelope(call, style)
        try:
            response = self._stream(call, body, envelope) if body.stream else self._whole(call, envelope)
        except BaseException:
            call.close()
            raise
        response.headers[TASK_HEADER] = call.task_ids
        response.headers["Cache-Control"] = "no-cache"
        response.call_on_close(call.close)
        return response

    def _whole(self, call: CompletionCall, envelope: "_Envelope") -> Response:
        deltas = [delta for batch in call.deltas() for delta in batch]
        with reply_slot(self._services):
            return Response(envelope.reply(deltas), content_type="application/json")

    def _stream(self, call: CompletionCall, body: CompletionFields, envelope: "_Envelope") -> Response:
        """The reply begins with the first token, or after the heartbeat interval. A task that fails before
        that has an error status.
        """
        heartbeat = self._services.settings.heartbeat_seconds
        deltas = call.deltas()
        first = call.first_deltas(deltas, heartbeat)
        batches = _with_errors(chain([first], deltas), problems.request_id())
        frames = _frames(call, batches, body, envelope, heartbeat)
        return stream_reply(frames)


def _on_disconnect(idempotency_key: str | None) -> str:
    """A client with a key may come back for the result, so its task continues."""
    return "cancel" if idempotency_key is None else "continue"


class _Envelope:
    """What surrounds the choices of a reply or a chunk."""

    def __init__(self, call: CompletionCall, style: Format) -> None:
        self._call = call
        self._style = style
        self._common = common_members(style, call.tasks[0].snapshot)

    def reply(self, deltas: list[Delta]) -> str:
        return _encode(whole_reply(self._style, self._common, deltas, self._call.usage()))

    def chunks(self, deltas: list[Delta], *, usage: bool | None) -> Iterator[bytes]:
        """Chunks for `deltas`. `usage`: True: with the usage so far; False: null; None: no such member."""
        for delta in deltas:
            for choice in self._style.chunks(delta):
                yield self._frame([choice], usage=usage)

    def usage_chunk(self) -> bytes:
        """The last chunk, without a choice."""
        return self._frame([], usage=True)

    def _frame(self, choices: list[dict[str, Any]], *, usage: bool | None) -> bytes:
        chunk = {**self._common, "object": self._style.chunk_kind, "choices": choices}
        if usage is not None:
            chunk["usage"] = usage_view(self._call.usage()) if usage else None
        return f"data: {_encode(chunk)}\n\n".encode()


def _with_errors(batches: Iterable[list[Delta]], request_id: str) -> Iterator[list[Delta] | bytes]:
    """`batches`; an error after the start of the stream is a frame of its own, and the last one."""
    try:
        yield from batches
    except Problem as problem:
        error = problem.to_json(request_id)["error"]
        yield f"data: {_encode({'error': error})}\n\n".encode()


def _frames(
    call: CompletionCall,
    batches: Iterable[list[Delta] | bytes],
    body: CompletionFields,
    envelope: _Envelope,
    heartbeat: float,
) -> Iterator[bytes]:
    """The stream: chunks, a comment for each `heartbeat` (seconds) without one, and the end."""
    usage = True if body.streams_usage_always else False if body.streams_usage else None
    last_sent = time.monotonic()
    try:
        for batch in batches:
            if isinstance(batch, bytes):
                yield batch + _DONE
                return
            frames = b"".join(envelope.chunks(batch, usage=usage))
            if not frames and time.monotonic() - last_sent >= heartbeat:
                frames = sse.HEARTBEAT
            if frames:
                yield frames
                last_sent = time.monotonic()
        yield (envelope.usage_chunk() if body.streams_usage else b"") + _DONE
    except GeneratorExit:
        # The server closes a stream that it cannot write.
        call.disconnected()
        raise
