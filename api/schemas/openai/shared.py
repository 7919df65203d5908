"""The request fields that chat and text completions share.

Unknown fields are ignored, as OpenAI's servers do. A field that would change the output and that this service
does not have is refused under its name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from api.problems import bad_field, from_validation
from api.schemas.openai.closed_schemas import closed
from api.schemas.requests import MAX_SALT_CHARACTERS, Seconds, TaskBody
from api.schemas.sampling import SamplingBody
from tokenmill.protocol import naming

Task = TypeVar("Task", bound=TaskBody)

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that are refused, with the values that change nothing. Null is always one of them."""
_INSTEAD = {
    "best_of": "use `n`",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "guided_choice": "use `structured_outputs`",
    "guided_grammar": "use `structured_outputs`",
    "guided_json": "use `structured_outputs`",
    "guided_regex": "use `structured_outputs`",
    "prompt_logprobs": "use /v1/tasks",
    "return_token_ids": "use /v1/tasks",
}
TASK_FIELDS = (
    "model",
    "cache_salt",
    "queue_timeout_seconds",
    "ttft_timeout_seconds",
    "timeout_seconds",
)
"""The fields that a completion passes to its task unchanged, besides the sampling fields."""


class Tolerant(BaseModel):
    """No conversions and no NaN. Unknown names are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Tolerant):
    """What a stream contains besides the text."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage and no choice.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in each chunk.")


class JsonSchemaFormat(Tolerant):
    """A named JSON schema."""

    name: str | None = Field(None, description="Not used.")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The JSON schema.")


class ResponseFormat(Tolerant):
    """The shape of the text: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(
        None,
        alias="schema",
        description="With `json_object`: the JSON schema of the object, as in llama.cpp.",
    )

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema is required for the type json_schema")
        return self

    def to_constraint(self) -> dict[str, Any] | None:
        """The value of `structured_outputs`; None for any text."""
        if self.type == "json_object":
            return {"json": closed(self.schema_)} if self.schema_ else {"json_object": True}
        return (
            {"json": closed(self.json_schema.schema_)} if self.json_schema and self.type != "text" else None
        )


class CompletionFields(SamplingBody):
    """The shared fields. All sampling fields of `/v1/tasks` are accepted too, also those that vLLM added."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="The public name of the model: see `/v1/models`.")
    stream: bool | None = Field(None, description="Return server-sent events, one or more for each token.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    response_format: ResponseFormat | None = Field(None, description="The shape of the text.")
    user: str | None = Field(None, description="Stored as `user` in the metadata of the task.")
    metadata: dict[str, Any] | None = Field(None, description="Stored with the task.")
    priority: int | None = Field(
        None,
        description="As in vLLM: 0 is the default, lower runs first. Added to the default priority of "
        f"`/v1/tasks`, {naming.DEFAULT_PRIORITY}; values beyond its range mean its ends.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = Field(
        None, description="Only prompts with the same salt share cached prefixes."
    )
    queue_timeout_seconds: Seconds | None = Field(
        None, description="Time limit for the start of the request, from its acceptance."
    )
    ttft_timeout_seconds: Seconds | None = Field(None, description="Time limit for the first token.")
    timeout_seconds: Seconds | None = Field(None, description="Time limit for the whole output.")

    @field_validator("top_k", mode="before", check_fields=False)
    @classmethod
    def _top_k_off(cls, top_k: object) -> object:
        """-1 is another spelling of 0 in vLLM."""
        return 0 if top_k == -1 and not isinstance(top_k, bool) else top_k

    @field_validator(
        "max_tokens", "max_completion_tokens", "max_output_tokens", mode="before", check_fields=False
    )
    @classmethod
    def _no_limit(cls, limit: object) -> object:
        """-1 is another spelling of null in llama.cpp and LM Studio."""
        return None if limit == -1 and not isinstance(limit, bool) else limit

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def streams_usage_always(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.continuous_usage_stats)

    def refuse_unsupported(self) -> None:
        """Raises `Problem` (400) for a field that this service does not have."""
        values = {**(self.model_extra or {}), "prompt_logprobs": self.sampling.get("prompt_logprobs")}
        for name, value in values.items():
            neutral = UNSUPPORTED.get(name, () if name == "prompt_logprobs" else (value,))
            if value is not None and value not in neutral:
                instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
                raise bad_field(name, f"is not supported by this route{instead}", "unsupported_field")

    def task_values(self) -> dict[str, Any]:
        """The fields of `TaskBody` that do not depend on the route."""
        values = {name: getattr(self, name) for name in TASK_FIELDS}
        values["priority"] = None if self.priority is None else to_priority_class(self.priority)
        metadata = self.metadata
        if self.user is not None:
            metadata = {"user": self.user, **(metadata or {})}
        return {**self.sampling, **values, "metadata": metadata, "structured_outputs": self._constraint()}

    def _constraint(self) -> object:
        own = self.sampling.get("structured_outputs")
        formatted = self.response_format.to_constraint() if self.response_format else None
        if own is not None and formatted is not None:
            raise bad_field("response_format", "set either response_format or structured_outputs, not both")
        return own if formatted is None else formatted


def to_priority_class(priority: int) -> int:
    """The class of a priority on vLLM's scale, whose default is 0: clients send it unasked."""
    lowest, highest = naming.PRIORITIES[0], naming.PRIORITIES[-1]
    return min(max(naming.DEFAULT_PRIORITY + priority, lowest), highest)


def to_task(kind: type[Task], values: dict[str, Any]) -> Task:
    """Raises `Problem` (400)."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from error
