"""Every value is one constraint of bounded size, or is refused with an error that names the member."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.structured_outputs import MAX_BYTES, MAX_CHOICES, MAX_DEPTH, StructuredOutputs


def nested(depth: int) -> Any:
    """A schema of `depth` nested objects and lists."""
    schema: Any = {}
    for level in range(depth - 1):
        schema = [schema] if level % 2 and level < depth - 2 else {"anyOf": schema}
    return schema


GOOD: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type": "object"}'},
    {"json_object": True},
    {"regex": "a+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "a"'},
    {"regex": "a", "json": None, "choice": None},
    {"choice": ["a\0b"]},
]


@pytest.mark.parametrize("value", GOOD)
def test_each_kind_is_accepted(value: dict[str, Any]) -> None:
    made = StructuredOutputs.from_json(value)
    kind = next(name for name, member in value.items() if member is not None)
    assert made.kind == kind
    assert made == StructuredOutputs.from_json(json.loads(json.dumps(value)))
    assert made.content == StructuredOutputs.from_json(value).content


def test_different_constraints_have_different_contents() -> None:
    contents = [StructuredOutputs.from_json(value).content for value in GOOD]
    contents += [
        StructuredOutputs(regex='root ::= "a"').content,
        StructuredOutputs(choice=("yes", "on")).content,
    ]
    assert len(set(contents)) == len(contents) - 1
    assert contents[0] == contents[1]


BAD: list[tuple[object, str]] = [
    ([], "must be an object"),
    ("json", "must be an object"),
    ({}, "exactly one of json, json_object, regex, choice, grammar, not none"),
    ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
    ({"regexp": "a"}, "'regexp' is not one of json, json_object"),
    ({"json_object": False}, "json_object: must be true"),
    ({"json_object": 1}, "json_object: must be true"),
    ({"json": []}, "json: must be a JSON schema"),
    ({"json": "{"}, "json: is not valid JSON"),
    ({"json": "[1]"}, "json: must be a JSON schema, which is an object"),
    ({"json": '{"minimum": NaN}'}, "json: is not valid JSON: NaN"),
    ({"json": {"minimum": float("inf")}}, "json: is not valid JSON"),
    ({"json": {"a": {1, 2}}}, "json: is not valid JSON"),
    ({"json": {"const": "\ud83d"}}, "json: .*surrogate"),
    ({"json": '{"const": "\\ud83d"}'}, "json: .*surrogate"),
    ({"json": {"const": "x" * MAX_BYTES}}, "json: must be at most"),
    ({"json": nested(MAX_DEPTH + 1)}, "json: must be nested at most"),
    ({"json": "[" * 60_000}, "json: "),
    ({"json": '{"a":' * 10_000 + "1" + "}" * 10_000}, "json: "),
    ({"regex": ""}, "regex: must be text"),
    ({"regex": 5}, "regex: must be text"),
    ({"regex": "\udc00"}, "regex: .*surrogate"),
    ({"regex": "é" * (MAX_BYTES // 2 + 1)}, "regex: must be at most"),
    ({"choice": []}, "choice: must not be empty"),
    ({"choice": "yes"}, "choice: must be a list"),
    ({"choice": [""]}, "choice: must be a list of texts"),
    ({"choice": [5]}, "choice: must be a list of texts"),
    ({"choice": ["\ud83d"]}, "choice: .*surrogate"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice: must have at most"),
    ({"choice": ["x" * 60_000, "y" * 60_000]}, "choice: must be at most"),
    ({"grammar": ""}, "grammar: must be text"),
    ({"grammar": "x" * (MAX_BYTES + 1)}, "grammar: must be at most"),
]


@pytest.mark.parametrize(("value", "message"), BAD, ids=range(len(BAD)))
def test_the_error_names_the_member(value: object, message: str) -> None:
    """vllm#43920: `json_object: false` must fail one request, not the engine."""
    with pytest.raises(InvalidParameter, match=f"(?s)^structured_outputs: .*{message}"):
        StructuredOutputs.from_json(value)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, object] = {}
    schema["items"] = schema
    with pytest.raises(InvalidParameter, match="json: is not valid JSON"):
        StructuredOutputs(json=schema)


def test_the_limits_themselves_are_allowed() -> None:
    StructuredOutputs(json=nested(MAX_DEPTH))
    StructuredOutputs(regex="x" * MAX_BYTES)
    StructuredOutputs(choice=("a",) * MAX_CHOICES)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["json", "json_object", "regex", "choice", "grammar", "x"]), JSON))
def test_any_value_is_a_constraint_or_refused(value: dict[str, object]) -> None:
    with suppress(InvalidParameter):
        "".join(StructuredOutputs.from_json(value).content).encode()
