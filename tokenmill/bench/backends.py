"""Sends one request to a server and notes when each piece of its text arrives.

A backend is cheap: for each piece it parses one line of JSON and notes a time.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tokenmill.bench.outcomes import Outcome, RequestFailed
from tokenmill.bench.prompts import Request

_MAX_MESSAGE = 300
Clock = Callable[[], float]


class Backend(Protocol):
    """`send` fills an outcome. It raises `RequestFailed`, and `httpx.HTTPError`."""

    name: str

    async def send(
        self, http: httpx.AsyncClient, request: Request, outcome: Outcome, clock: Clock
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    """`url`: of the server, without `/v1`. `model`: None sends none. `fields`: added to each body."""

    url: str
    model: str | None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def _body(self, prompt: Mapping[str, Any], request: Request, **more: Any) -> dict[str, Any]:
        model = {"model": self.model} if self.model else {}
        return {**model, **prompt, "max_tokens": request.max_tokens, **more, **self.fields}


class OpenAICompletions(_Requests):
    """`POST /v1/completions` of any server that has it."""

    name = "openai"

    async def send(self, http: httpx.AsyncClient, request: Request, outcome: Outcome, clock: Clock) -> None:
        if not isinstance(request.prompt, str):
            raise RequestFailed("messages", "a prompt of messages needs the backend openai-chat or tokenmill")
        body = self._body({"prompt": request.prompt}, request, **_STREAM)
        await _follow_openai(http, f"{self.url}/v1/completions", body, outcome, clock)


class OpenAIChat(_Requests):
    """`POST /v1/chat/completions` of any server that has it."""

    name = "openai-chat"

    async def send(self, http: httpx.AsyncClient, request: Request, outcome: Outcome, clock: Clock) -> None:
        body = self._body({"messages": _messages(request)}, request, **_STREAM)
        await _follow_openai(http, f"{self.url}/v1/chat/completions", body, outcome, clock)


class TokenmillTasks(_Requests):
    """`POST /v1/tasks` and the events of the task. The task is cancelled if the load is interrupted."""

    name = "tokenmill"

    async def send(self, http: httpx.AsyncClient, request: Request, outcome: Outcome, clock: Clock) -> None:
        kind = "prompt" if isinstance(request.prompt, str) else "messages"
        body = self._body({kind: request.prompt}, request, on_disconnect="cancel")
        reply = await http.post(f"{self.url}/v1/tasks", content=json.dumps(body), headers=_JSON)
        if not reply.is_success:
            raise _refused(reply.status_code, reply.content)
        async with http.stream("GET", self.url + reply.json()["urls"]["events"]) as events:
            await _check(events)
            async for data in _data_lines(events):
                event = json.loads(data)
                if event.get("token") is not None:
                    outcome.times.append(clock())
                if event.get("done"):
                    _note_usage(outcome, event.get("usage"))
                    _check_end(event)
                    return
        raise RequestFailed("incomplete", "the events ended before the task")


_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_JSON = {"Content-Type": "application/json"}
BACKENDS = {backend.name: backend for backend in (TokenmillTasks, OpenAICompletions, OpenAIChat)}


async def _follow_openai(
    http: httpx.AsyncClient, url: str, body: Mapping[str, Any], outcome: Outcome, clock: Clock
) -> None:
    async with http.stream("POST", url, content=json.dumps(body), headers=_JSON) as response:
        await _check(response)
        has_ended = False
        async for data in _data_lines(response):
            if data == b"[DONE]":
                has_ended = True
                break
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise RequestFailed("error in the stream", _message(error))
            for choice in chunk.get("choices") or ():
                if _text(choice):
                    outcome.times.append(clock())
                has_ended = has_ended or choice.get("finish_reason") is not None
            _note_usage(outcome, chunk.get("usage"))
    if not has_ended:
        raise RequestFailed("incomplete", "the stream ended before the text")


def _text(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk carries output: text, reasoning or a part of a tool call."""
    if delta := choice.get("delta"):
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))


def _messages(request: Request) -> list[dict[str, Any]]:
    prompt = request.prompt
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _note_usage(outcome: Outcome, usage: Mapping[str, Any] | None) -> None:
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.output_tokens = usage.get("completion_tokens")


def _check_end(event: Mapping[str, Any]) -> None:
    if error := event.get("error"):
        raise RequestFailed(str(error.get("code")), str(error.get("message")))
    if event.get("finish_reason") not in ("stop", "length"):
        raise RequestFailed(
            str(event.get("finish_reason")), f"the task ended as {event.get('finish_reason')}"
        )


async def _check(response: httpx.Response) -> None:
    """Raises `RequestFailed` for an error status."""
    if not response.is_success:
        raise _refused(response.status_code, await response.aread())


def _refused(status: int, body: bytes) -> RequestFailed:
    try:
        fields = json.loads(body)
        message = _message(fields.get("error", fields))
    except (ValueError, AttributeError):
        message = body.decode("utf-8", "replace")
    return RequestFailed(f"HTTP {status}", message[:_MAX_MESSAGE])


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


async def _data_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event. Events of these servers have one line of data."""
    rest = b""
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
