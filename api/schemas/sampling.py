"""The fields of a body that say how tokens are chosen and when a text ends, as OpenAPI shows them.

Law: strict types (true is not 1, "5" is not 5), and the ranges of the engine's sampling parameters. An
optional field that is null counts as not given. What is in no range of the engine's has a bound here: no
body makes much work.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from api.schemas.structured_outputs import StructuredOutputsBody

MAX_N = 128
MAX_STOPS = 16
MAX_BAD_WORDS = 128
MAX_TEXT_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 262_144
MAX_LOGPROBS = 20


class Strict(BaseModel):
    """No conversions, no unknown names, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bounded(value: object) -> object:
    # Before the entries are looked at: each wrong one is an error of its own.
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} entries")
    return value


def _keyed_by_ids(biases: dict[str, float]) -> dict[str, float]:
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 18 and str(int(key)) == key):
            raise ValueError("each name must be a token id in digits")
    return biases


# `fail_fast`: a list of a million wrong items is one error, not a million.
TokenId = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
Stops = Annotated[
    list[Text],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARACTERS},
                {"type": "array", "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_bounded),
    AfterValidator(_keyed_by_ids),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _given(description: str) -> Any:
    return Field(None, description=description)


class SamplingBody(Strict):
    """Names and ranges are those of the engine's `SamplingParams`."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = _given("So many outputs of one prompt; null: 1.")
    max_tokens: Annotated[int, Field(ge=1)] | None = _given(
        "At most so many tokens of an output; null: the model's default, or up to the model's length. "
        "More than there is room for is lowered: see `output_limit` of the task."
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = _given("Nothing ends the text before; null: 0.")
    temperature: Annotated[float, Field(ge=0)] | None = _given("0 is greedy; null: 1.")
    top_k: Annotated[int, Field(ge=0)] | None = _given(
        "So many of the likeliest tokens are kept; 0 and null: all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = _given(
        "The likeliest tokens that reach this share of probability are kept; null: 1."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = _given(
        "Tokens below this share of the likeliest's probability are dropped; null: 0."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = _given(
        "One seed gives one text; null: a random one."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = _given(
        "Taken off the logits of tokens that stand in the output; null: 0."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = _given(
        "The same, as often as they stand there; null: 0."
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = _given(
        "Divides the logits of tokens that stand in prompt or output; null: 1."
    )
    logit_bias: LogitBias | None = _given("Token ids, as strings, and what is added to their logits.")
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = _given("No other tokens are chosen.")
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = _given(
        "Texts whose tokens are not chosen in this order."
    )
    structured_outputs: StructuredOutputsBody | None = _given("What the whole text must look like.")
    stop: Stops | None = _given(f"A string, or up to {MAX_STOPS}, that end the text and are cut from it.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = (
        _given("Token ids that end the text.")
    )
    include_stop_str_in_output: bool | None = _given("The string that ended the text stays in it.")
    ignore_eos: bool | None = _given("The model's own end is not an end.")
    skip_special_tokens: bool | None = _given("Special tokens leave no text; null: true.")
    logprobs: NumLogprobs | None = _given(
        "Tell the log-probability of each token, and so many of the likeliest beside it."
    )
    prompt_logprobs: NumLogprobs | None = _given("The same of the prompt's tokens.")

    @field_validator("min_tokens")
    @classmethod
    def _at_most_max(cls, min_tokens: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens")
        if min_tokens is not None and most is not None and min_tokens > most:
            raise ValueError("must be at most max_tokens")
        return min_tokens


SAMPLING_FIELDS = tuple(SamplingBody.model_fields)
