"""The field `structured_outputs`, as OpenAPI shows it. Whether a grammar compiles is seen later."""

import json
from typing import Annotated, Any, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

MAX_SCHEMA_CHARACTERS = 256 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_REGEX_CHARACTERS = 8 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _schema(value: object) -> object:
    if not isinstance(value, (str, dict)):
        raise ValueError("must be a JSON schema: an object, or its JSON text")
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"must have at most {MAX_SCHEMA_CHARACTERS} characters of JSON")
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError("must be a JSON schema: an object, or its JSON text")
    return value


def _only_true(value: object) -> object:
    if value is not True:
        raise ValueError("must be true where it is given")
    return value


JsonSchema = Annotated[
    Any, BeforeValidator(_schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
]


class StructuredOutputsBody(BaseModel):
    """What the whole text must look like; exactly one member is given."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    # The base class has a method of the field's own name.
    schema_: JsonSchema | None = Field(None, alias="json", description="A JSON schema, or its JSON text.")
    json_object: Annotated[bool, AfterValidator(_only_true)] | None = Field(
        None, description="true: any JSON object."
    )
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARACTERS)] | None = Field(
        None, description="A regular expression that the whole text matches."
    )
    choice: Choices | None = Field(None, description="The texts to choose from.")
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)] | None = Field(
        None, description="An EBNF grammar: GBNF with `root`, or Lark with `start`."
    )

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputsBody":
        if len(given := self.to_json()) != 1:
            names = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise ValueError(f"give exactly one of {names}, not {' and '.join(given) or 'none'}")
        return self

    def to_json(self) -> dict[str, Any]:
        """The member that is given, under the name that the client wrote."""
        return self.model_dump(by_alias=True, exclude_none=True)
