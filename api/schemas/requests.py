"""What comes in, as OpenAPI shows it: bodies, headers, queries.

Law: strict types (true is not 1, "5" is not 5), and a name that is not here is refused by name. An optional
field that is null counts as not given.
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

Seconds = Annotated[float, Field(gt=0, le=MAX_LIMIT_SECONDS)]


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class WebhookBody(Strict):
    """A signed `POST` with the task, as polling shows it, when it has ended. The secret is the service's."""

    url: Annotated[str, Field(max_length=MAX_CHARACTERS)] = Field(description="http or https.")

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str) -> str:
        parse_url(url)
        return url


class TaskBody(SamplingBody):
    """A request for text. Give exactly one of `prompt`, `messages` and `prompt_token_ids`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 32,
                "temperature": 0,
            }
        },
    )

    prompt: Annotated[str, Field(min_length=1)] | None = Field(None, description="Text to go on from.")
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(None, description="A chat, written out by the model's own template.")
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="The prompt as the model's token ids, taken as they are."
    )
    model: str | None = Field(None, description="The model's public name; null: the one that is served.")
    priority: Annotated[int, Field(ge=naming.PRIORITIES[0], le=naming.PRIORITIES[-1])] | None = Field(
        None, description=f"Lower goes first; null: {naming.DEFAULT_PRIORITY}."
    )
    queue_timeout_seconds: Seconds | None = Field(
        None, description="It ends as `timeout` if it was not started so long after its acceptance."
    )
    ttft_timeout_seconds: Seconds | None = Field(None, description="The same for its first token.")
    timeout_seconds: Seconds | None = Field(None, description="The same for its end; what there is is kept.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = Field(
        None, description="Prompts find each other's computed beginnings only under the same salt."
    )
    on_disconnect: Literal["continue", "cancel"] | None = Field(
        None, description="`cancel`: it ends when the last client that follows or waits goes away."
    )
    webhook: WebhookBody | None = Field(None, description="Where to tell of its end.")
    metadata: dict[str, Any] | None = Field(
        None, description=f"Given back with the task; at most {MAX_METADATA_BYTES} bytes of JSON."
    )

    @field_validator("metadata")
    @classmethod
    def _small(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        if len(json.dumps(metadata, ensure_ascii=False).encode()) > MAX_METADATA_BYTES:
            raise ValueError(f"must be at most {MAX_METADATA_BYTES} bytes of JSON")
        return metadata

    @model_validator(mode="after")
    def _one_input(self) -> "TaskBody":
        given = [name for name in INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of prompt, messages and prompt_token_ids, not {found}")
        return self


class _Parameters(BaseModel):
    """Headers or a query. Their schemas are kept: the framework asks for them again with every call."""

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **options) if args or options else _schema_of(cls)


@cache
def _schema_of(parameters: type[_Parameters]) -> dict[str, Any]:
    return super(_Parameters, parameters).model_json_schema()


class SubmitHeaders(_Parameters):
    """Headers of a submission."""

    idempotency_key: str | None = Field(
        None,
        alias="Idempotency-Key",
        description="One key, one task: the same body again gives the same task, another body 422.",
    )
    prefer: str | None = Field(
        None, alias="Prefer", description=f"`wait=n` waits up to n (at most {MAX_WAIT_SECONDS:.0f}) seconds."
    )


class TaskPath(BaseModel):
    """The task that a URL names."""

    task_id: str = Field(description="32 hex digits, as the submission gave them.")


class WaitQuery(_Parameters):
    """How long a poll may wait."""

    wait: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description=f"Answer when it ends, or after so many seconds (at most {MAX_WAIT_SECONDS:.0f}). "
        "Without a free place it is answered at once, with the header `Tokenmill-Wait: skipped`.",
    )


class EventsQuery(_Parameters):
    """Where a stream begins."""

    after: int | None = Field(None, ge=-1, description="Begin behind this `seq`; -1 and none: at the start.")


class EventsHeaders(_Parameters):
    """What a reconnecting event source sends."""

    last_event_id: str | None = Field(
        None, alias="Last-Event-ID", description="The last `seq` that was received; goes before `after`."
    )
