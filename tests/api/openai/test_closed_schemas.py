"""Which objects of a schema are closed."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from api.schemas.openai.closed_schemas import closed

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
COUNTRY = {"type": "object", "properties": {"country": {"type": "string"}}}
ROME = {"city": "Rome"}
MORE = {"city": "Rome", "cuisine": "x"}


@pytest.mark.parametrize(
    ("schema", "fitting", "refused"),
    [
        (CITY, ROME, MORE),
        ({"type": "array", "items": CITY}, [ROME], [MORE]),
        ({"properties": {"a": CITY}}, {"a": ROME}, {"a": MORE}),
        ({"anyOf": [CITY, {"type": "null"}]}, ROME, MORE),
        ({"$defs": {"c": CITY}, "properties": {"a": {"$ref": "#/$defs/c"}}}, {"a": ROME}, {"a": MORE}),
        ({"allOf": [{"$ref": "#/$defs/c"}], "$defs": {"c": CITY}}, ROME, MORE),
        ({"additionalProperties": CITY}, {"x": ROME}, {"x": MORE}),
    ],
)
def test_an_object_is_closed(schema: Any, fitting: Any, refused: Any) -> None:
    validator = Draft202012Validator(closed(schema))
    assert validator.is_valid(fitting)
    assert not validator.is_valid(refused)
    assert Draft202012Validator(schema).is_valid(refused)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": {"type": "string"}},
        {**CITY, "unevaluatedProperties": True},
        {**CITY, "patternProperties": {"^c": {"type": "string"}}},
        {"allOf": [CITY, COUNTRY]},
        {**CITY, "anyOf": [COUNTRY, {"required": ["cuisine"]}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": CITY, "b": COUNTRY}},
        {**CITY, "$ref": "#/$defs/b", "$defs": {"b": COUNTRY}},
        True,
        {"properties": 3},
    ],
)
def test_an_object_that_says_so_or_that_several_schemas_describe_stays_open(schema: Any) -> None:
    assert closed(schema) == schema
