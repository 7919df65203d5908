"""Schemas that pydantic emits compile, or are refused with an error that names the keyword."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest

from api.json_body import parse_object
from api.problems import Problem
from api.schemas.requests import TaskBody
from engine.requests.json_schemas import _PATTERNS, rewrite_schema
from engine.structured_outputs import StructuredOutputs
from tests.tiny_grammars import BYTE_LEVEL, EOS_IDS, bytes_to_ids


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(pydantic.BaseModel):
    value: int
    children: "list[Tree]" = []


class Point(NamedTuple):
    x: int
    label: str


COMPILED: list[tuple[Any, str, str | None]] = [
    (pathlib.Path, '"/a/b"', "5"),
    (pydantic.FilePath, '"a"', "5"),
    (pydantic.DirectoryPath, '"a"', "5"),
    (pydantic.SecretStr, '"a"', "5"),
    (dict[Literal["a", "b"], int], '{"a":1,"b":2}', '{"c":1}'),
    (dict[Colour, list[Cat]], '{"red":[{"kind":"cat","lives":9}]}', '{"red":[{"kind":"dog"}]}'),
    (dict[Annotated[str, pydantic.Field(pattern="^[a-c]+$")], int], '{"abc":1}', '{"abc":"'),
    (dict[Annotated[str, pydantic.Field(min_length=1, max_length=3)], int], '{"abc":1}', '{"abcd":1}'),
    (dict[int, str], '{"1":"a"}', None),
    (dict[str, int], '{"a":1}', '{"a":"b"}'),
    (int | None, "5", '"a"'),
    (datetime.datetime, '"2026-01-02T03:04:05Z"', '"2026"'),
    (datetime.date, '"2026-01-02"', '"x"'),
    (datetime.timedelta, '"P1D"', '"x"'),
    (decimal.Decimal, "1.5", "true"),
    (uuid.UUID, '"8c7a2f0e-5f0b-4b8e-9d3b-0f0e5d6c7b8a"', '"x"'),
    (pydantic.UUID4, '"8c7a2f0e-5f0b-4b8e-9d3b-0f0e5d6c7b8a"', '"8c7a2f0e-5f0b-1'),
    (Colour, '"red"', '"green"'),
    (Level, "2", "3"),
    (tuple[int, str], '[1,"a"]', '["a"'),
    (tuple[int, ...], "[1,2,3]", '["a"'),
    (Point, '[1,"a"]', '["a"'),
    (Annotated[int, pydantic.Field(ge=1, lt=10)], "9", "0"),
    (Annotated[int, pydantic.Field(multiple_of=5)], "15", '"a"'),
    (Annotated[list[int], pydantic.Field(max_length=2)], "[1,2]", "[1,2,"),
    (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], '{"kind":"cat","lives":9}', '{"kind":"cow"'),
    (Tree, '{"value":1,"children":[{"value":2}]}', '{"value":"a"'),
    (pydantic.Base64Str, '"YWI="', '"YWI"'),
    (bytes, '"a"', "5"),
    (ipaddress.IPv4Address, '"1.2.3.4"', '"1.x'),
    (pydantic.IPvAnyAddress, '"1.2.3.4"', '"zz'),
    (pydantic.HttpUrl, '"http://a.b/"', "5"),
    (Literal[1, "a", True, None], '"a"', '"b"'),
    (Any, "[1]", None),
]  # fmt: skip
REFUSED: list[tuple[Any, str]] = [
    (set[int], "uniqueItems"),
    (frozenset[str], "uniqueItems"),
    (re.Pattern, "format.*regex"),
    (ipaddress.IPv4Network, "format.*ipv4network"),
    (dict[ipaddress.IPv4Address, int], "propertyNames"),
]


def outputs_of(kind: Any, *, as_text: bool = False) -> StructuredOutputs:
    schema = pydantic.TypeAdapter(kind).json_schema()
    return StructuredOutputs(json=json.dumps(schema) if as_text else schema)


def fits(outputs: StructuredOutputs, text: str) -> bool:
    grammar = BYTE_LEVEL.backend.compile(outputs)()
    try:
        grammar.advance(bytes_to_ids(text))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("kind", "text", "other"), COMPILED, ids=lambda value: str(value)[:40])
def test_schemas_that_pydantic_emits_compile(kind: Any, text: str, other: str | None) -> None:
    outputs = outputs_of(kind)
    assert BYTE_LEVEL.mask(outputs, text) & EOS_IDS, text
    if other is not None:
        assert not fits(outputs, other)


@pytest.mark.parametrize(("kind", "keyword"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_schema_that_does_not_compile_is_refused_with_its_keyword_and_pointer(
    kind: Any, keyword: str
) -> None:
    class Holder(pydantic.BaseModel):
        good: pathlib.Path
        inner: kind

    for as_text in (False, True):
        with pytest.raises(ValueError, match=f"^json: the keyword .*{keyword}") as caught:
            BYTE_LEVEL.backend.compile(outputs_of(Holder, as_text=as_text))
        assert "(at #/properties/inner)" in str(caught.value)


@pytest.mark.parametrize("name", _PATTERNS)
def test_patterns_of_formats_are_those_of_python(name: str) -> None:
    texts = {"base64": ["", "YQ==", "YWI=", "YWJj", "+/+/"], "base64url": ["", "YQ==", "-_-_"]}
    if name.startswith("uuid"):
        version = int(name[4:])
        texts[name] = [
            str(uuid.UUID(int=number, version=version if version <= 5 else None)) for number in (5, 2**100)
        ]
        texts[name] = [f"{one[:14]}{version}{one[15:19]}8{one[20:]}"[:36] for one in texts[name]]
    pattern = re.compile(_PATTERNS[name])
    assert all(pattern.search(one) for one in texts[name]), texts[name]
    assert not any(map(pattern.search, ("x", "YQ=")))


def test_a_schema_is_rewritten_as_a_copy_and_at_any_depth() -> None:
    schema = {"anyOf": [{"type": "array", "items": {"format": "path"}, "uniqueItems": False}, True]}
    before = json.dumps(schema)
    assert rewrite_schema(schema) == {"anyOf": [{"type": "array", "items": {}}, True]}
    assert json.dumps(schema) == before
    assert rewrite_schema(True) is True
    named = {"properties": {"format": {"const": "path"}, "propertyNames": {"type": "string"}}}
    assert rewrite_schema(named) == named


@pytest.mark.parametrize("depth", [1, 20, 32, 33, 34, 49, 50, 51])
def test_an_object_and_its_text_are_one_schema(depth: int) -> None:
    """20 nested objects were refused as an object, and accepted as text."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    verdicts = {is_accepted(schema), is_accepted(json.dumps(schema, indent=4))}
    assert verdicts == {depth * 2 + 1 <= 100}


def is_accepted(schema: object) -> bool:
    """Whether the API and the engine accept `schema`; both decide alike."""
    verdicts = set()
    body = json.dumps({"prompt": "x", "structured_outputs": {"json": schema}}).encode()
    for read in (
        lambda: TaskBody.model_validate(parse_object(body)),
        lambda: StructuredOutputs(json=schema),  # type: ignore[arg-type]
    ):
        try:
            read()
            verdicts.add(True)
        except (ValueError, Problem):
            verdicts.add(False)
    assert len(verdicts) == 1
    return verdicts.pop()


@pytest.mark.parametrize(
    ("schema", "text", "good"),
    [
        ({"const": "é" * 30_000}, json.dumps({"const": "é" * 30_000}), True),
        ({"const": "é" * 33_000}, json.dumps({"const": "é" * 33_000}), False),
        ({"const": [1] * 20_000}, json.dumps({"const": [1] * 20_000}, indent=8), True),
    ],
)
def test_the_size_of_a_schema_does_not_depend_on_its_formatting(
    schema: object, text: str, good: bool
) -> None:
    assert is_accepted(schema) is good
    assert is_accepted(text) is good


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"minimum": 1e999}', '{"minimum": NaN}', "[]", "{"])
def test_a_text_is_refused_where_the_object_would_be(text: str) -> None:
    assert not is_accepted(text)


def test_an_invalid_format_of_property_names_is_refused_with_the_keyword() -> None:
    schema = {"type": "object", "propertyNames": {"format": ["uuid4"]}}
    with pytest.raises(ValueError, match=r"the keyword `propertyNames` \(at #\)"):
        rewrite_schema(schema)


def test_many_properties_cost_no_copies_of_each_other() -> None:
    schema = {"properties": {str(one): {"format": "path"} for one in range(20_000)}}
    assert rewrite_schema(schema) == {"properties": {str(one): {} for one in range(20_000)}}
