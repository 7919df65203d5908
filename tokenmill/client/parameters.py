"""The fields of a submission, as keyword arguments of `submit`.

The service checks the values and names the field. A field that is None is not set.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class StructuredOutputs(TypedDict, total=False):
    """A constraint on the whole text of each output. Set one member."""

    json: Mapping[str, Any] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


class Webhook(TypedDict):
    """Where the service sends a signed `POST` with the task when it has ended."""

    url: str


class SamplingParameters(TypedDict, total=False):
    """What chooses the tokens and ends the outputs. The reference of the HTTP API describes each field."""

    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    structured_outputs: StructuredOutputs | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    logprobs: int | None
    prompt_logprobs: int | None


class TaskParameters(SamplingParameters, total=False):
    """The fields of a submission besides the prompt. Timeouts: seconds since the acceptance."""

    messages: Sequence[Message] | None
    prompt_token_ids: Sequence[int] | None
    model: str | None
    priority: int | None
    queue_timeout_seconds: float | None
    ttft_timeout_seconds: float | None
    timeout_seconds: float | None
    cache_salt: str | None
    on_disconnect: Literal["continue", "cancel"] | None
    webhook: Webhook | None
    metadata: Mapping[str, Any] | None


class TaskFilters(TypedDict, total=False):
    """Which tasks a list contains: those that meet all filters. Times: seconds since the epoch, or a date.

    `metadata`: values of members of the task's metadata, compared as text.
    """

    status: Status | None
    model: str | None
    metadata: Mapping[str, str] | None
    created_after: float | datetime | None
    created_before: float | datetime | None
