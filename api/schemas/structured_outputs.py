"""The field `structured_outputs`, as OpenAPI shows it. Whether a grammar compiles is seen later."""

import json
import math
from collections import Counter
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

MAX_BYTES = 64 * 1024
MAX_DEPTH = 100
MAX_CHOICES = 1000
MAX_CHOICE_CHARACTERS = 1024


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _schema(value: object) -> object:
    if not isinstance(value, (str, dict)):
        raise ValueError("must be a JSON schema: an object, or its JSON text")
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        schema = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_repetition
        )
        # Of what is said, however it was spelled. Escapes of half a surrogate pair are no text.
        compact = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        compact.encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError("must be a JSON schema: an object, or its JSON text")
    _check_depth(schema)
    _check_bytes(compact)
    return value


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits:.40} is too large")
    return number


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r:.40} is there twice")
    return values


def _check_bytes(text: str) -> str:
    if (size := len(text.encode())) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes, not {size}")
    return text


def _check_total(texts: list[str]) -> list[str]:
    _check_bytes("".join(texts))
    return texts


def _check_depth(schema: object) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"must be nested at most {MAX_DEPTH} deep")


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
    AfterValidator(_check_total),
]


class StructuredOutputsBody(BaseModel):
    """What the whole text must look like; exactly one member is given."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    # The base class has a method of the field's own name.
    schema_: JsonSchema | None = Field(None, alias="json", description="A JSON schema, or its JSON text.")
    json_object: Annotated[bool, AfterValidator(_only_true)] | None = Field(
        None, description="true: any JSON object."
    )
    regex: Annotated[str, Field(min_length=1), AfterValidator(_check_bytes)] | None = Field(
        None, description="A regular expression that the whole text matches."
    )
    choice: Choices | None = Field(None, description="The texts to choose from.")
    grammar: Annotated[str, Field(min_length=1), AfterValidator(_check_bytes)] | None = Field(
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
