"""The sampling fields of a body, derived from the definition in `engine.sampling_params`.

Types are strict: true is not 1, and "5" is not 5. A field that is null is not set. Every list has a
maximum length, even if the engine has none: a small body must not cause much work.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property, singledispatch
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from engine.errors import InvalidParameter
from engine.sampling_params import Constraint, SamplingParams, check_min_tokens
from engine.structured_outputs import JsonSchema, StructuredOutputs
from engine.validation import (
    Boolean,
    Integer,
    Number,
    NumbersByTokenId,
    Rule,
    Text,
    Texts,
    TokenIds,
    is_token_id,
)

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_NOTES = {
    "max_tokens": " It is lowered where less fits: see `output_limit` of the task.",
    "seed": " Default: a random number.",
}
"""Behaviour of the service that the engine does not have."""

TokenId = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """No conversions, no unknown names, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _definitions(parameters: type) -> dict[str, Any]:
    """Pydantic fields for a dataclass whose fields were made by `engine.validation.parameter`."""
    definitions: dict[str, Any] = {}
    for field in fields(parameters):
        description = field.metadata["description"]
        if field.name in _NOTES:
            description += _NOTES[field.name]
        elif isinstance(field.default, (bool, int, float)):
            description += f" Default: {_shown(field.default)}."
        # BaseModel has a method `json`.
        name, alias = ("schema_", "json") if field.name == "json" else (field.name, None)
        annotation = _annotation(field.metadata["rule"])
        definitions[name] = (annotation | None, Field(None, alias=alias, description=description))
    return definitions


def _shown(default: bool | float) -> str:
    return str(default).lower() if isinstance(default, bool) else f"{default:g}"


@singledispatch
def _annotation(rule: Rule) -> Any:
    """The type of the values that a rule allows."""
    raise TypeError(f"no schema for {rule}")


@_annotation.register
def _boolean(rule: Boolean) -> Any:
    return Annotated[bool, AfterValidator(_checked(rule))]


@_annotation.register
def _integer(rule: Integer) -> Any:
    return Annotated[int, Field(ge=rule.minimum, le=rule.maximum)]


@_annotation.register
def _number(rule: Number) -> Any:
    if rule.above_minimum:
        return Annotated[float, Field(gt=rule.minimum, le=rule.maximum)]
    return Annotated[float, Field(ge=rule.minimum, le=rule.maximum)]


@_annotation.register
def _text(rule: Text) -> Any:
    return Annotated[str, Field(min_length=1), AfterValidator(_checked(rule))]


@_annotation.register
def _texts(rule: Texts) -> Any:
    text = Annotated[str, Field(min_length=1, max_length=rule.http_max_characters)]
    # `fail_fast`: a list of a million bad items is one error, not a million.
    length = Field(min_length=None if rule.allow_empty else 1, max_length=rule.http_max_items, fail_fast=True)
    texts = Annotated[list[text], length, AfterValidator(_checked(rule))]
    if not rule.http_accepts_text:
        return texts
    one = {"type": "string", "minLength": 1, "maxLength": rule.http_max_characters}
    several = {"type": "array", "maxItems": rule.http_max_items, "items": {"type": "string", "minLength": 1}}
    return Annotated[texts, BeforeValidator(_as_list), WithJsonSchema({"anyOf": [one, several]})]


@_annotation.register
def _token_ids(rule: TokenIds) -> Any:
    length = Field(min_length=None if rule.allow_empty else 1, max_length=rule.http_max_items, fail_fast=True)
    return Annotated[list[TokenId], length]


@_annotation.register
def _numbers_by_token_id(rule: NumbersByTokenId) -> Any:
    def check_size(value: object) -> object:
        # Before the members are checked: each bad one would be an error of its own.
        if isinstance(value, dict) and len(value) > rule.http_max_items:
            raise ValueError(f"must have at most {rule.http_max_items} entries")
        return value

    def check_names(numbers: dict[str, float]) -> dict[str, float]:
        if not all(map(is_token_id, numbers)):
            raise ValueError("each name must be a token id in digits")
        return numbers

    schema = {
        "type": "object",
        "maxProperties": rule.http_max_items,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "additionalProperties": {"type": "number", "minimum": rule.minimum, "maximum": rule.maximum},
    }
    number = Annotated[float, Field(ge=rule.minimum, le=rule.maximum)]
    return Annotated[
        dict[str, number],
        BeforeValidator(check_size),
        AfterValidator(check_names),
        WithJsonSchema(schema),
    ]


@_annotation.register
def _json_schema(rule: JsonSchema) -> Any:
    any_json = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
    return Annotated[Any, BeforeValidator(_checked(rule)), any_json]


@_annotation.register
def _constraint(_rule: Constraint) -> Any:
    return create_model(
        "StructuredOutputsBody",
        __base__=_OneConstraint,
        __doc__=_OneConstraint.__doc__,
        **_definitions(StructuredOutputs),
    )


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _checked(rule: Rule) -> Callable[[Any], Any]:
    """A validator that applies the engine's rule. Pydantic names the field."""

    def check(value: Any) -> Any:
        try:
            rule.check("", value)
        except InvalidParameter as error:
            raise ValueError(error.message) from None
        return value

    return check


class _OneConstraint(Strict):
    """A constraint on the whole text. Set exactly one member."""

    @model_validator(mode="after")
    def _one_member(self) -> Self:
        try:
            StructuredOutputs.from_json(self.model_dump(by_alias=True, exclude_none=True))
        except InvalidParameter as error:
            raise ValueError(error.message) from None
        return self


class _Sampling(Strict):
    @field_validator("min_tokens", check_fields=False)
    @classmethod
    def _at_most_max_tokens(cls, min_tokens: int | None, info: ValidationInfo) -> int | None:
        if min_tokens is not None:
            try:
                check_min_tokens(min_tokens, info.data.get("max_tokens"))
            except InvalidParameter as error:
                raise ValueError(error.message) from None
        return min_tokens

    @cached_property
    def sampling_params(self) -> SamplingParams:
        """The engine's parameters; unset fields have their defaults. Raises `InvalidParameter`."""
        return SamplingParams.from_json(self.sampling)

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """The fields that are set, as JSON values."""
        return self.model_dump(include=set(SAMPLING_FIELDS), exclude_none=True, by_alias=True)


if TYPE_CHECKING:  # a type checker accepts no base class that is computed
    SamplingBody = _Sampling
else:
    SamplingBody = create_model("SamplingBody", __base__=_Sampling, **_definitions(SamplingParams))
