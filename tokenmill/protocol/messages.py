"""What travels: the request that waits in Redis, and the events that its readers see. Frozen values.

Text is JSON-encoded here, in Python; the scripts only concatenate. Knows neither Redis nor the engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

JOB_FUNCTION = "worker.tasks.generate"
"""The one function name that a worker accepts. It is a name only: nothing is imported or called."""

VERSION = 1


class ProtocolError(Exception):
    """A stored request or event does not have the shape that this version writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request as the API puts it on the queue.

    Exactly one of `prompt`, `messages` and `prompt_token_ids` is given. `sampling` holds fields of the
    engine's SamplingParams by name, as JSON has them. The limits are seconds since the acceptance. Prompts
    find each other's computed beginnings only under one `cache_salt`.
    """

    id: str
    model: str
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 2
    cache_salt: str | None = None
    queue_timeout_seconds: float | None = None
    ttft_timeout_seconds: float | None = None
    timeout_seconds: float | None = None

    def to_payload(self) -> dict[str, Any]:
        """Plain JSON values; what is None is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_payload(cls, payload: object) -> "GenerateRequest":
        """Raises `ProtocolError` for anything that `to_payload` does not give."""
        if not isinstance(payload, Mapping):
            raise ProtocolError("a request is a JSON object")
        try:
            values = dict(payload)
            for name in ("messages", "prompt_token_ids"):
                if values.get(name) is not None:
                    values[name] = tuple(values[name])
            request = cls(**values)
        except TypeError as error:
            raise ProtocolError(f"not a request: {error}") from error
        given = (request.prompt, request.messages, request.prompt_token_ids)
        if sum(value is not None for value in given) != 1:
            raise ProtocolError("a request has one of prompt, messages and prompt_token_ids")
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one task."""

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
    """Why a task failed, as HTTP errors tell it: `type` and `code` for programs, `message` for people."""

    type: str
    code: str
    message: str
    param: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of one output of a task. `text` may be empty while characters are held back.

    `logprobs`, where they were asked for: `logprob`, `token` (as text), `bytes` and `top` of this token.
    `prompt_logprobs` come once, with a first token: one for each prompt token, None for the first of them.
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
    """The end of one output; with `done`, of the whole task, and then `usage` and `error` are the task's.

    `text` is what had been held back. Without `done`, `error` is that of this output. `token` is always None:
    both kinds of event have the members `seq`, `index`, `token` and `text`.
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


Event = TokenEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One message as the log stores it: compact strings.

    `token`: the id in digits, or "" at an end. `text`: a JSON string literal. `index`: digits. `members`: ""
    or further JSON members: of an end `"finish_reason":"stop","done":true,...`, of a token its logprobs.
    """

    token: str
    text: str
    index: str = "0"
    members: str = ""

    @property
    def is_end(self) -> bool:
        """Of an output, or of the whole task."""
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
        """From a stream entry: fields `t`, `x`, and, where they are not the default, `i` and `m`."""
        return cls(
            fields.get(b"t", b"").decode(),
            fields[b"x"].decode(),
            fields.get(b"i", b"0").decode(),
            fields.get(b"m", b"").decode(),
        )

    def to_message(self, task_id: str, seq: int) -> str:
        """The published JSON, byte for byte as the script builds it."""
        members = f",{self.members}" if self.members else ""
        return (
            f'{{"v":{VERSION},"id":"{task_id}","seq":{seq},"index":{self.index},'
            f'"token":{self.token or "null"},"text":{self.text}{members}}}'
        )


def decode(message: str | bytes) -> Event:
    """The event of a published message. Raises `ProtocolError`."""
    try:
        fields = json.loads(message)
        common = {name: fields[name] for name in ("id", "seq", "index", "text")}
        if fields["token"] is not None:
            return TokenEvent(
                token=fields["token"],
                logprobs=fields.get("logprobs"),
                prompt_logprobs=fields.get("prompt_logprobs"),
                **common,
            )
        return FinishedEvent(
            finish_reason=fields["finish_reason"],
            done=fields.get("done", False),
            usage=fields.get("usage"),
            error=fields.get("error"),
            **common,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"not an event: {message!r}") from error


def entry_seq(entry_id: bytes) -> int:
    """The `seq` of the log entry `0-(seq+1)`."""
    return int(entry_id.split(b"-")[1]) - 1


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Made once: `json.dumps` with options makes one at each call, and this is called for each token."""
