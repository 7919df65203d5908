"""Converts a client's request into token ids, `SamplingParams` and `Deadlines`.

An invalid value is refused under the field's name in the HTTP API. The engine checks the limits of the model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from engine.errors import InvalidParameter
from engine.requests.deadlines import Deadlines
from engine.sampling_params import SamplingParams
from engine.structured_outputs import FIELD as STRUCTURED_OUTPUTS
from engine.structured_outputs import StructuredOutputs
from tokenmill.protocol.messages import GenerateRequest
from worker.errors import RequestRefused, invalid_parameter, invalid_value

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_DIGITS = re.compile("0|[1-9][0-9]{0,18}")
_DEADLINES = tuple(field.name for field in fields(Deadlines))
"""The fields have the same names in `GenerateRequest`."""


class PromptTokenizer(Protocol):
    """The part of the model's tokenizer that the worker uses. Encoding raises `InvalidParameter`."""

    def encode(self, text: str) -> list[int]: ...
    def encode_text(self, text: str) -> list[int]: ...
    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...
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
            return tokenizer.render_chat(_checked_messages(request.messages))
        if request.prompt is not None:
            return tokenizer.encode(_checked_text("prompt", request.prompt))
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error
    token_ids = request.prompt_token_ids or ()
    # `isinstance` would accept True, and comparisons of ranges would accept 1.5.
    if not all(type(token_id) is int for token_id in token_ids):
        raise _refused("prompt_token_ids", "must be a list of integers")
    return list(token_ids)


def to_sampling_params(sampling: object) -> SamplingParams:
    """Raises `RequestRefused`."""
    if not isinstance(sampling, Mapping):
        raise _refused("sampling", "must be an object")
    for name in sampling:
        if name not in _SAMPLING_FIELDS:
            raise _refused(str(name), "is not supported by this worker")
    try:
        values = {name: _to_engine_value(name, value) for name, value in sampling.items()}
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error
    for field in ("stop", "bad_words"):
        for text in _strings(values.get(field)):
            _checked_text(field, text)
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error


def to_deadlines(request: GenerateRequest) -> Deadlines:
    """Raises `RequestRefused`."""
    try:
        return Deadlines(**{name: getattr(request, name) for name in _DEADLINES})
    except InvalidParameter as error:
        raise RequestRefused(invalid_parameter(error, error.field)) from error


def _to_engine_value(name: str, value: object) -> Any:
    """Converts a JSON value: lists to tuples, keys of `logit_bias` to integers. Raises `InvalidParameter`."""
    if name == STRUCTURED_OUTPUTS and value is not None:
        return StructuredOutputs.from_json(value)
    if name == "logit_bias" and isinstance(value, Mapping):
        return {_token_id(key): bias for key, bias in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _token_id(key: object) -> object:
    # Any other key is refused by `SamplingParams`, unchanged.
    return int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key


def _checked_messages(messages: Sequence[object]) -> list[Mapping[str, str]]:
    if not messages:
        raise _refused("messages", "must have at least one message")
    checked: list[Mapping[str, str]] = []
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise _refused("messages", "each message must be an object with `role` and `content`")
        checked.append({name: _checked_text("messages", text) for name, text in message.items()})
    return checked


def _checked_text(field: str, text: object) -> str:
    """Refuses an unpaired surrogate: JSON can hold one, but it is not a character and cannot be encoded."""
    if not isinstance(text, str):
        raise _refused(field, "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(field, "contains an unpaired surrogate") from error
    return text


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, tuple) else []


def _refused(field: str, message: str) -> RequestRefused:
    return RequestRefused(invalid_value(field, f"{field}: {message}"))
