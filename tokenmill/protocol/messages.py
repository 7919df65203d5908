"""The wire format: the request that is queued in Redis, and the events that readers of a task receive.

An event has one JSON form. `encode` writes it for HTTP; the script part `append.lua` writes the same bytes
to the channel from the strings of a `LogEntry`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenmill.protocol.naming import DEFAULT_PRIORITY

JOB_FUNCTION = "worker.tasks.generate"
"""The only function name that a worker accepts. It is a name only: nothing is imported or called."""

VERSION = 1


class ProtocolError(Exception):
    """A stored request or event does not have the format that this version writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request as the API queues it.

    Exactly one of `prompt`, `messages` and `prompt_token_ids` is set. `tools`, `chat_template_kwargs`:
    further arguments of the model's chat template. `tool_use`: how the API reads tool calls from the text;
    the worker does not use it. `sampling`: fields of the engine's SamplingParams as JSON values. Timeouts:
    seconds since the acceptance. `cache_salt`: prompts share cached prefixes only with prompts of the same
    salt.
    """

    id: str
    model: str
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    tool_use: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = DEFAULT_PRIORITY
    cache_salt: str | None = None
    queue_timeout_seconds: float | None = None
    ttft_timeout_seconds: float | None = None
    timeout_seconds: float | None = None

    def to_payload(self) -> dict[str, Any]:
        """JSON values; fields that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_payload(cls, payload: object) -> "GenerateRequest":
        """Raises `ProtocolError` for anything that `to_payload` does not return."""
        if not isinstance(payload, Mapping):
            raise ProtocolError("a request is a JSON object")
        try:
            values = dict(payload)
            for name in ("messages", "prompt_token_ids", "tools"):
                if values.get(name) is not None:
                    values[name] = tuple(values[name])
            request = cls(**values)
        except TypeError as error:
            raise ProtocolError(f"not a request: {error}") from error
        prompts = (request.prompt, request.messages, request.prompt_token_ids)
        if sum(value is not None for value in prompts) != 1:
            raise ProtocolError("a request has one of prompt, messages and prompt_token_ids")
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one task."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskError:
    """Why a task failed, in the form of HTTP errors: `type` and `code` for programs, `message` for users."""

    type: str
    code: str
    message: str
    param: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of one output of a task. `text` may be empty while an incomplete character is held back.

    `logprobs`, if requested: `logprob`, `token` (text), `bytes` and `top` of this token. `prompt_logprobs`
    come once, with a first token: one item for each prompt token, None for the first of them.
    """

    id: str
    seq: int
    token: int
    text: str
    index: int = 0
    logprobs: Mapping[str, Any] | None = None
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent:
    """The end of one output; with `done`, of the whole task.

    `text`: the rest that was held back. `usage` and `error`: the task's, if `done`; otherwise `error` is the
    output's. `token` is always None, so that both kinds of events have `seq`, `index`, `token` and `text`.
    """

    id: str
    seq: int
    text: str
    finish_reason: str
    token: None = None
    index: int = 0
    done: bool = False
    usage: Mapping[str, int] | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An event of a type that a newer version has added. Readers skip it, but count its `seq`."""

    id: str
    seq: int


Event = TokenEvent | FinishedEvent
AnyEvent = Event | UnknownEvent


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event as the log stores it: strings from which the script builds the JSON without parsing.

    `token`: the token id in digits, or "" for an end. `text`: a JSON string literal. `index`: digits.
    `members`: "" or further JSON members, such as `"finish_reason":"stop","done":true` or logprobs.
    """

    token: str
    text: str
    index: str = "0"
    members: str = ""

    @property
    def is_end(self) -> bool:
        """Whether this ends an output or the whole task."""
        return not self.token

    @classmethod
    def of_token(
        cls, token: int, text: str, index: int = 0, members: Mapping[str, Any] | None = None
    ) -> "LogEntry":
        return cls(str(token), _json(text), str(index), _json(members)[1:-1] if members else "")

    @classmethod
    def of_end(
        cls,
        text: str,
        finish_reason: str,
        *,
        index: int = 0,
        done: bool = True,
        usage: Usage | None = None,
        error: TaskError | None = None,
    ) -> "LogEntry":
        members: dict[str, Any] = {"finish_reason": finish_reason}
        if done:
            members["done"] = True
            members["usage"] = usage.to_json() if usage else None
            members["error"] = error.to_json() if error else None
        elif error:
            members["error"] = error.to_json()
        return cls("", _json(text), str(index), _json(members)[1:-1])

    @classmethod
    def of_fields(cls, fields: Mapping[bytes, bytes]) -> "LogEntry":
        """From a stream entry: `t` (token), `x` (text), and where not the default `i` (index), `m` (members).

        Raises `ProtocolError` for an entry without text.
        """
        if b"x" not in fields:
            raise ProtocolError(f"not an entry of a log: {fields!r}")
        return cls(
            fields.get(b"t", b"").decode(),
            fields[b"x"].decode(),
            fields.get(b"i", b"0").decode(),
            fields.get(b"m", b"").decode(),
        )

    def parse_members(self) -> dict[str, Any]:
        """The further members: `finish_reason`, `usage`, `error`, logprobs. Raises ValueError."""
        members: dict[str, Any] = json.loads(f"{{{self.members}}}") if self.members else {}
        return members

    def to_event(self, task_id: str, seq: int) -> Event:
        """Raises `ProtocolError` for an entry that this version does not write."""
        try:
            token = int(self.token) if self.token else None
            common = {"id": task_id, "seq": seq, "index": int(self.index), "text": json.loads(self.text)}
            return _event(token, common, self.parse_members())
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"not an event: {self!r}") from error


def encode(event: Event) -> str:
    """The JSON form of an event, byte for byte as the script publishes it."""
    members: dict[str, Any] = {"v": VERSION, "id": event.id, "seq": event.seq, "index": event.index}
    members |= {"token": event.token, "text": event.text}
    if isinstance(event, TokenEvent):
        logprobs = {"logprobs": event.logprobs, "prompt_logprobs": event.prompt_logprobs}
        members |= {name: value for name, value in logprobs.items() if value is not None}
    else:
        members["finish_reason"] = event.finish_reason
        if event.done:
            members |= {"done": True, "usage": event.usage, "error": event.error}
        elif event.error:
            members["error"] = event.error
    return _json(members)


def decode(message: str | bytes) -> Event:
    """The event of a published message. Raises `ProtocolError`."""
    event = decode_any(message)
    if isinstance(event, UnknownEvent):
        raise ProtocolError(f"not an event of this version: {message!r}")
    return event


def decode_any(message: str | bytes) -> AnyEvent:
    """The event of a published message, of any type of this version of the protocol. Raises `ProtocolError`.

    A type that a newer version adds does not have the member `token`.
    """
    try:
        members = json.loads(message)
        if members.get("v", VERSION) != VERSION:
            raise ProtocolError(f"version {members['v']!r} of the protocol, where {VERSION} is expected")
        if "token" not in members:
            return UnknownEvent(id=members["id"], seq=members["seq"])
        common = {name: members[name] for name in ("id", "seq", "index", "text")}
        return _event(members["token"], common, members)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not an event: {message!r}") from error


def _event(token: int | None, common: dict[str, Any], members: Mapping[str, Any]) -> Event:
    if token is not None:
        return TokenEvent(
            token=token,
            logprobs=members.get("logprobs"),
            prompt_logprobs=members.get("prompt_logprobs"),
            **common,
        )
    return FinishedEvent(
        finish_reason=members["finish_reason"],
        done=members.get("done", False),
        usage=members.get("usage"),
        error=members.get("error"),
        **common,
    )


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Created once: `json.dumps` with options creates an encoder at each call, and this runs for each token."""
