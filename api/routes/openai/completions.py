"""The routes `/v1/chat/completions` and `/v1/completions`."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag

from api import problems
from api.authentication import SCHEME_NAME
from api.problems import Problem
from api.routes.openai.chat_format import ChatFormat
from api.routes.openai.completion_call import TASK_HEADER, CompletionCall
from api.routes.openai.deltas import Delta
from api.routes.openai.text_format import TextFormat
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
from api.tool_calls.formats import DEFAULT_FORMAT
from api.tool_calls.reading import CallReading

TAG = Tag(name="OpenAI-compatible", description="The routes of OpenAI's API, on the same tasks.")
_DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Format(Protocol):
    """Turns deltas into the choices of a route."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...
    def reply(self, deltas: list[Delta]) -> list[dict[str, Any]]: ...


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
        return self._reply(call, body, self._chat_format(call, body))

    def complete(self, header: SubmitHeaders, body: CompletionBody) -> Response:
        key = parse_idempotency_key(header.idempotency_key)
        call = self._submit(body.to_tasks(_on_disconnect(key)), key)
        return self._reply(call, body, TextFormat(_echoed(body), has_logprobs=body.num_logprobs is not None))

    def _chat_format(self, call: CompletionCall, body: ChatCompletionBody) -> ChatFormat:
        tools = body.tool_use
        reading = CallReading(**tools.to_json())
        return ChatFormat(
            call.tasks[0].snapshot.task_id,
            lambda tool_format: reading.new_parser(tools.functions, tool_format)(),
            # Read at the first token, not now: a request may be the first one, before a worker is ready.
            cache(self._services.tool_format) if tools.tools else lambda: DEFAULT_FORMAT,
            reports_calls=reading.mode != "named",
        )

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


def _echoed(body: CompletionBody) -> dict[int, str | list[int]]:
    """The prompts to repeat, by the index of the choice."""
    num_outputs = body.sampling.get("n", 1)
    prompts = [prompt for prompt in body.prompt for _ in range(num_outputs)] if body.echo else []
    return dict(enumerate(prompts))


class _Envelope:
    """What surrounds the choices of a reply or a chunk."""

    def __init__(self, call: CompletionCall, style: Format) -> None:
        self._call = call
        self._style = style
        first = call.tasks[0].snapshot
        self._common = {
            "id": style.id_prefix + first.task_id,
            "created": int(first.accepted_at),
            "model": first.model,
        }

    def reply(self, deltas: list[Delta]) -> str:
        choices = self._style.reply(deltas)
        usage = _usage(self._call.usage())
        return _encode({**self._common, "object": self._style.kind, "choices": choices, "usage": usage})

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
            chunk["usage"] = _usage(self._call.usage()) if usage else None
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


def _usage(counts: dict[str, int]) -> dict[str, Any]:
    prompt, completion = counts["prompt_tokens"], counts["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counts["cached_tokens"]},
    }
