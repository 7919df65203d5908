"""Converts a client's request into token ids, `SamplingParams` and `Deadlines`.

An invalid value is refused under the field's name in the HTTP API. The engine checks the limits of the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, cast

from engine.errors import InvalidParameter
from engine.requests.deadlines import Deadlines
from engine.sampling_params import SamplingParams
from engine.validation import check_encoding
from tokenmill.protocol.messages import GenerateRequest
from worker.errors import RequestRefused, invalid_parameter

_DEADLINES = tuple(field.name for field in fields(Deadlines))
"""The fields have the same names in `GenerateRequest`."""


class PromptTokenizer(Protocol):
    """The part of the model's tokenizer that the worker uses. Encoding raises `InvalidParameter`."""

    def encode(self, text: str) -> list[int]: ...
    def encode_text(self, text: str) -> list[int]: ...
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


def prompt_field(request: GenerateRequest) -> str:
    """The field in which the client gave the prompt."""
    if request.messages is not None:
        return "messages"
    return "prompt" if request.prompt is not None else "prompt_token_ids"


def to_token_ids(request: GenerateRequest, tokenizer: PromptTokenizer) -> list[int]:
    """Raises `RequestRefused`."""
    try:
        if request.messages is not None:
            messages = _checked_messages(request.messages)
            return tokenizer.render_chat(messages, *_template_arguments(request))
        if request.prompt is not None:
            return tokenizer.encode(_checked_text("prompt", request.prompt))
        return _checked_ids(request.prompt_token_ids or ())
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error


def to_sampling_params(sampling: object) -> SamplingParams:
    """Raises `RequestRefused`."""
    try:
        return SamplingParams.from_json(sampling)
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error


def to_deadlines(request: GenerateRequest) -> Deadlines:
    """Raises `RequestRefused`."""
    try:
        return Deadlines(**{name: getattr(request, name) for name in _DEADLINES})
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error


def _checked_ids(token_ids: Sequence[object]) -> list[int]:
    # `isinstance` would accept True, and comparisons of ranges would accept 1.5.
    if not all(type(token_id) is int for token_id in token_ids):
        raise InvalidParameter("prompt_token_ids", "must be a list of integers")
    return cast(list[int], list(token_ids))


def _template_arguments(request: GenerateRequest) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """The tools and the further arguments of the chat template."""
    tools, arguments = request.tools or (), request.chat_template_kwargs or {}
    if not isinstance(arguments, Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidParameter("tools", "must be a list of objects")
    check_encoding("tools", json.dumps([*tools, arguments], ensure_ascii=False), None)
    return tools, arguments


def _checked_messages(messages: Sequence[object]) -> list[Mapping[str, Any]]:
    if not messages:
        raise InvalidParameter("messages", "must have at least one message")
    checked: list[Mapping[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidParameter("messages", "each message must be an object with `role` and `content`")
        for name in ("role", "content"):
            _checked_text("messages", message[name])
        # Calls of tools are nested.
        check_encoding("messages", json.dumps(message, ensure_ascii=False), None)
        checked.append(message)
    return checked


def _checked_text(field: str, text: object) -> str:
    """Raises `InvalidParameter` for an unpaired surrogate, which JSON can hold and UTF-8 cannot."""
    if not isinstance(text, str):
        raise InvalidParameter(field, "must be a string")
    check_encoding(field, text, None)
    return text
