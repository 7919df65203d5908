"""Request bodies, headers and queries, as OpenAPI shows them.

Types are strict: true is not 1, and "5" is not 5. An unknown name is refused. An optional field that is null
is not set.
"""

import json
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from api.schemas.sampling import SamplingBody, Strict, TokenId
from api.schemas.webhook_url import MAX_CHARACTERS, parse_url
from tokenmill.protocol import naming
from tokenmill.protocol.limits import MAX_LIMIT_SECONDS

INPUTS = ("prompt", "messages", "prompt_token_ids")
MAX_MESSAGES = 10_000
MAX_METADATA_BYTES = 16 * 1024
MAX_WAIT_SECONDS = 60.0
MAX_SALT_CHARACTERS = 256
MAX_LISTED = 100

MAX_MOMENT = 1e11
"""Seconds since the epoch, some 3000 years. Redis compares microseconds, which need 17 digits."""
Moment = Annotated[float, Field(ge=0, le=MAX_MOMENT, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=MAX_LIMIT_SECONDS)]


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class WebhookBody(Strict):
    """Where to send a signed `POST` with the task when it has ended."""

    url: Annotated[str, Field(max_length=MAX_CHARACTERS)] = Field(description="An http or https URL.")

    @field_validator("url")
    @classmethod
    def _is_valid(cls, url: str) -> str:
        parse_url(url)
        return url


class TaskBody(SamplingBody):
    """A request for text. Set exactly one of `prompt`, `messages` and `prompt_token_ids`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 32,
                "temperature": 0,
            }
        },
    )

    prompt: Annotated[str, Field(min_length=1)] | None = Field(None, description="Text to continue.")
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(None, description="A chat, rendered by the chat template of the model.")
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="The prompt as token ids of the model."
    )
    model: str | None = Field(
        None, description="The public name of the model. Refused if this service serves another one."
    )
    priority: Annotated[int, Field(ge=naming.PRIORITIES[0], le=naming.PRIORITIES[-1])] | None = Field(
        None, description=f"Lower runs first. Default: {naming.DEFAULT_PRIORITY}."
    )
    queue_timeout_seconds: Seconds | None = Field(
        None, description="The task ends as `timeout` if it has not started this long after its acceptance."
    )
    ttft_timeout_seconds: Seconds | None = Field(None, description="The same for its first token.")
    timeout_seconds: Seconds | None = Field(
        None, description="The same for its end. The output so far is kept."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = Field(
        None, description="Only prompts with the same salt share cached prefixes."
    )
    on_disconnect: Literal["continue", "cancel"] | None = Field(
        None,
        description="`cancel`: the task is cancelled when the last client that follows it or waits for it "
        "disconnects. Default: `continue`.",
    )
    webhook: WebhookBody | None = Field(None, description="Called when the task has ended.")
    metadata: dict[str, Any] | None = Field(
        None, description=f"Returned with the task. At most {MAX_METADATA_BYTES} bytes of JSON."
    )

    @field_validator("metadata")
    @classmethod
    def _is_small(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        if len(json.dumps(metadata, ensure_ascii=False).encode()) > MAX_METADATA_BYTES:
            raise ValueError(f"must be at most {MAX_METADATA_BYTES} bytes of JSON")
        return metadata

    @model_validator(mode="after")
    def _one_input(self) -> "TaskBody":
        inputs = [name for name in INPUTS if getattr(self, name) is not None]
        if len(inputs) != 1:
            found = " and ".join(inputs) or "none"
            raise ValueError(f"set exactly one of prompt, messages and prompt_token_ids, not {found}")
        return self

    @property
    def chat_fields(self) -> dict[str, Any]:
        """The fields of `GenerateRequest` that only a chat of the OpenAI-compatible routes has."""
        return {}


class Parameters(BaseModel):
    """Headers or a query. The schema is cached: flask-openapi3 asks for it at each call."""

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **options) if args or options else _schema_of(cls)


@cache
def _schema_of(parameters: type[Parameters]) -> dict[str, Any]:
    return super(Parameters, parameters).model_json_schema()


class SubmitHeaders(Parameters):
    """Headers of a submission."""

    idempotency_key: str | None = Field(
        None,
        alias="Idempotency-Key",
        description="A retry with the same key and body returns the task of the first call. Another body is "
        "refused with 422.",
    )
    prefer: str | None = Field(
        None,
        alias="Prefer",
        description=f"`wait=n`: wait up to n seconds for the task to end, at most {MAX_WAIT_SECONDS:.0f}. "
        "Anything else is ignored, as RFC 7240 requires, also a `wait` that is not an integer.",
    )


class TaskPath(BaseModel):
    """The task."""

    task_id: str = Field(description="The `id` of the task, 32 hexadecimal digits.")


class WaitQuery(Parameters):
    """How long a poll waits."""

    wait: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description=f"Wait up to this many seconds for the end of the task, at most {MAX_WAIT_SECONDS:.0f}. "
        "If too many calls wait already, the reply comes at once, with the header `Tokenmill-Wait: skipped`.",
    )


class TaskQuery(WaitQuery):
    """How long a poll waits, and what it returns."""

    include: Literal["prompt"] | None = Field(
        None, description="`prompt`: the reply has the request as it was submitted."
    )


class ListQuery(Parameters):
    """Which tasks a list shows. Besides these, `metadata.KEY=VALUE` compares a member of the metadata."""

    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"] | None = None
    model: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="The public name of the model."
    )
    created_after: Moment | None = Field(
        None, description="Accepted at or after this time, in seconds since the epoch."
    )
    created_before: Moment | None = Field(None, description="Accepted before this time.")
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = Field(20, description="The most tasks of a part.")
    after: Annotated[str, Field(pattern=r"^\d{1,17}-[0-9a-f]{32}$")] | None = Field(
        None, description="`next` of the part before."
    )


class EventsQuery(Parameters):
    """Where a stream starts."""

    after: int | None = Field(
        None,
        ge=-1,
        description="Start after the event with this `seq`. Default: -1, before the first one.",
    )


class EventsHeaders(Parameters):
    """What a reconnecting EventSource sends."""

    last_event_id: str | None = Field(
        None, alias="Last-Event-ID", description="The `id` of the last event received. Overrides `after`."
    )
