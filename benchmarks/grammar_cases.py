"""The cases for comparing grammar libraries: schemas from small to large, bad ones and hostile ones.

Each case has a text that must be allowed, or one that must not.
"""

import json
from typing import NamedTuple


class Case(NamedTuple):
    """`text` is valid and is read token by token."""

    name: str
    kind: str
    grammar: str
    text: str


def _json(name: str, schema: object, value: object) -> Case:
    return Case(name, "json", json.dumps(schema), json.dumps(value, ensure_ascii=False))


def _object(properties: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


_STRING = {"type": "string"}
_WHOLE = {"type": "integer"}
_PROSE = 'The quick brown fox, who was "not" amused, jumped over 13 lazy dogs (twice) in München. ' * 4
_PERSON = _object({"name": _STRING, "age": _WHOLE, "email": _STRING})
_TREE = {
    "$defs": {
        "node": _object({"value": _WHOLE, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})
    },
    "$ref": "#/$defs/node",
}
_SHAPES = {
    "anyOf": [
        _object({"kind": {"const": "circle"}, "radius": {"type": "number"}}),
        _object({"kind": {"const": "square"}, "side": {"type": "number"}}),
        _object({"kind": {"const": "text"}, "content": _STRING}),
    ]
}
_ORDER = _object(
    {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{6}$"},
        "customer": _PERSON,
        "lines": {
            "type": "array",
            "minItems": 1,
            "items": _object({"sku": _STRING, "count": _WHOLE, "price": {"type": "number"}, "note": _STRING}),
        },
        "status": {"enum": ["new", "paid", "sent", "back"]},
        "shape": _SHAPES,
    }
)
_WIDE = _object({f"field_{index}": [_STRING, _WHOLE, {"type": "boolean"}][index % 3] for index in range(120)})
_GBNF = r"""
root ::= expression
expression ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= number | "(" expression ")"
number ::= [0-9]+ ("." [0-9]+)?
"""

CASES = [
    _json("flat", _PERSON, {"name": "Ada", "age": 36, "email": "ada@example.org"}),
    _json("long string", _object({"text": _STRING}), {"text": _PROSE}),
    _json("enum of 500", {"enum": [f"country {index}" for index in range(500)]}, "country 321"),
    _json("array", {"type": "array", "items": _WHOLE}, list(range(60))),
    _json(
        "pattern", _object({"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{6}$"}}), {"id": "ABC-123456"}
    ),
    _json(
        "anyOf",
        {"type": "array", "items": _SHAPES},
        [{"kind": "square", "side": 1.5}, {"kind": "circle", "radius": 2}],
    ),
    _json(
        "recursive",
        _TREE,
        {"value": 1, "children": [{"value": 2, "children": [{"value": 3, "children": []}]}] * 3},
    ),
    _json(
        "bounds",
        {
            "type": "array",
            "items": {"type": "string", "minLength": 3, "maxLength": 60},
            "minItems": 2,
            "maxItems": 40,
        },
        ["abcdef ghi"] * 20,
    ),
    _json(
        "nested",
        _ORDER,
        {
            "id": "ABC-123456",
            "customer": {"name": "Ada", "age": 36, "email": "ada@example.org"},
            "lines": [{"sku": "x1", "count": 2, "price": 9.5, "note": "a gift"}] * 3,
            "status": "paid",
            "shape": {"kind": "text", "content": "hello there"},
        },
    ),
    _json(
        "120 fields", _WIDE, {f"field_{index}": ["some text", 17, True][index % 3] for index in range(120)}
    ),
    Case(
        "any object",
        "json",
        '{"type": "object"}',
        json.dumps({"a": [1, {"b": None}], "c": _PROSE}, ensure_ascii=False),
    ),
    Case("regex: date", "regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "2026-11-30"),
    Case(
        "regex: words",
        "regex",
        r"([a-z]+ ){5,40}[a-z]+",
        "over the lazy dog and the other fox " * 4 + "again",
    ),
    Case("regex: far back", "regex", r"(.*a.{20}b|.*c.{21}d)", "x" * 40 + "a" + "y" * 20 + "b"),
    Case("choice of 3", "choice", json.dumps(["positive", "negative", "neutral"]), "neutral"),
    Case(
        "choice of 500",
        "choice",
        json.dumps([f"label {index} of many" for index in range(500)]),
        "label 321 of many",
    ),
    Case("ebnf: sums", "ebnf", _GBNF, "(1+22)*3.5-(4/(5+6))*7+88*(9-10)"),
]

FEATURES = {
    "type": ({"type": "integer"}, '"text"'),
    "const": ({"const": "a"}, '"b"'),
    "required": (_object({"a": _WHOLE}), "{}"),
    "additionalProperties": (_object({"a": _WHOLE}), '{"a": 1, "b": 2}'),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": _WHOLE}, "additionalProperties": False},
        '{"b": 1}',
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b": 1}'),
    "minProperties": ({"type": "object", "minProperties": 1}, "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 2}'),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "minItems": ({"type": "array", "minItems": 1}, "[]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1, 2]"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1, 1]"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "[2]"),
    "prefixItems": ({"type": "array", "prefixItems": [_STRING], "items": False}, "[1]"),
    "minLength": ({"type": "string", "minLength": 2}, '"a"'),
    "maxLength": ({"type": "string", "maxLength": 2}, '"abc"'),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"b"'),
    "pattern and maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    "format: date": ({"type": "string", "format": "date"}, '"tomorrow"'),
    "format: unknown": ({"type": "string", "format": "isbn"}, '"tomorrow"'),
    "minimum": ({"type": "integer", "minimum": 5}, "4"),
    "number minimum": ({"type": "number", "minimum": 0.5}, "0.25"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, "5"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "7"),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 3}]}, "9"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "5"),
    "not": ({"type": "string", "not": {"const": "a"}}, '"a"'),
    "if then": ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, "9"),
    "sibling of $ref": ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 5}, "4"),
    "false": ({"type": "object", "properties": {"a": False}}, '{"a": 1}'),
}
"""Keywords: a schema, and a text that it forbids."""

BAD = {
    "no such type": ("json", '{"type": "text"}'),
    "no such $ref": ("json", '{"$ref": "#/$defs/a"}'),
    "remote $ref": ("json", '{"$ref": "https://example.org/a"}'),
    "empty enum": ("json", '{"enum": []}'),
    "impossible": ("json", '{"type": "integer", "minimum": 5, "maximum": 2}'),
    "endless $ref": ("json", '{"$ref": "#"}'),
    "regex: open bracket": ("regex", "[a-z"),
    "regex: look-ahead": ("regex", "a(?=b)b"),
    "regex: back reference": ("regex", r"(a)\1"),
    "regex: word border": ("regex", r"\bfoo\b"),
    "ebnf: no root": ("ebnf", 'start ::= "a"'),
    "ebnf: unknown rule": ("ebnf", "root ::= other"),
    "ebnf: open group": ("ebnf", 'root ::= ("a"'),
    "ebnf: endless": ("ebnf", "root ::= root"),
}

HOSTILE = {
    "repeated repeats": ("regex", "(a{1,1000}){1,1000}"),
    "three deep": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "exponential automaton": ("regex", "(.|\n)*a.{300}b.{300}c"),
    "8000 alternatives": ("regex", "|".join(f"w{index}x*" for index in range(8000))),
    "1000 groups": ("regex", "(" * 1000 + "a" + ")" * 1000),
    "deep schema": ("json", '{"items":' * 3000 + "{}" + "}" * 3000),
    "maxLength 10^8": ("json", '{"type": "string", "maxLength": 100000000}'),
    "minItems 10^5": ("json", '{"type": "array", "items": {"type": "integer"}, "minItems": 100000}'),
    "1500 optional fields": (
        "json",
        json.dumps(
            {
                "type": "object",
                "properties": {f"p{i}": _WHOLE for i in range(1500)},
                "additionalProperties": False,
            }
        ),
    ),
    "2^60 by $ref": (
        "json",
        json.dumps(
            {
                "$defs": {
                    f"d{i}": {
                        "type": "object",
                        "properties": {
                            "a": {"$ref": f"#/$defs/d{i + 1}"},
                            "b": {"$ref": f"#/$defs/d{i + 1}"},
                        },
                    }
                    for i in range(60)
                }
                | {"d60": _STRING},
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    "4^12 by allOf": (
        "json",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(12)
                ]
            }
        ),
    ),
    "30 patterns in allOf": (
        "json",
        json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(10, 40)]}),
    ),
    "multipleOf 1000003": ("json", '{"type": "integer", "multipleOf": 1000003}'),
    "2^40 by rules": (
        "ebnf",
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"',
    ),
    "ambiguous": ("ebnf", 'root ::= s\ns ::= s s | s s s | "a"'),
    "5000 groups": ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
}
