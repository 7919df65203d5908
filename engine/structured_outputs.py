"""Constraints on the text of an output.

A value is either one constraint of bounded size or refused with `InvalidParameter`, which says what is wrong.
Whether a grammar compiles is checked later, outside the step loop.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.errors import InvalidParameter
from engine.validation import Boolean, Rule, Text, Texts, check_encoding, excerpt, parameter

FIELD = "structured_outputs"
MAX_BYTES = 65_536
"""Size of one constraint, in UTF-8."""
MAX_CHOICES = 1_000
MAX_DEPTH = 100
"""Nesting of a JSON schema, counting each object and each list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema(Rule):
    """A JSON schema, as an object or as JSON text."""

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, (str, Mapping)):
            raise InvalidParameter(name, "must be a JSON schema: an object, or its JSON text")
        try:
            # `dumps` refuses NaN, infinities and objects that contain themselves.
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            schema = json.loads(
                text,
                parse_constant=_refuse_constant,
                parse_float=_to_finite,
                object_pairs_hook=_without_duplicates,
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidParameter(name, f"is not valid JSON: {error}") from error
        if not isinstance(schema, (dict, bool)):
            raise InvalidParameter(name, "must be a JSON schema, which is an object")
        _check_depth(name, schema)
        # Encoded again without escapes: an escape may hide an unpaired surrogate.
        check_encoding(name, json.dumps(schema, ensure_ascii=False, separators=(",", ":")), MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueOnly(Boolean):
    """The value true."""

    def check(self, name: str, value: object) -> None:
        if value is not True:
            raise InvalidParameter(name, "must be true if it is set")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """One constraint: exactly one field is set. vLLM's field of the same name has the same members.

    A `regex` is a `pattern` of JSON Schema: `\\d` and `\\w` are ASCII; there are no look-arounds and no back
    references. Raises `InvalidParameter`.
    """

    json: Mapping[str, object] | str | None = parameter(
        None, JsonSchema(), "A JSON schema for the text: an object, or its JSON text."
    )
    json_object: bool | None = parameter(None, TrueOnly(), "true: the text is a JSON object.")
    regex: str | None = parameter(
        None, Text(max_bytes=MAX_BYTES), "A regular expression that matches the whole text."
    )
    choice: tuple[str, ...] | None = parameter(
        None,
        Texts(
            allow_empty=False,
            max_items=MAX_CHOICES,
            max_bytes=MAX_BYTES,
            http_max_items=MAX_CHOICES,
            http_max_characters=1024,
        ),
        "The allowed texts.",
    )
    grammar: str | None = parameter(
        None,
        Text(max_bytes=MAX_BYTES),
        "A grammar with the start symbol `root` (GBNF, as llama.cpp defines it) or `start` (Lark, as "
        "llguidance reads it).",
    )

    @classmethod
    def from_json(cls, value: object) -> "StructuredOutputs":
        """The constraint of a JSON object with one member. Members that are null are ignored."""
        if not isinstance(value, Mapping):
            raise InvalidParameter(FIELD, "must be an object with one constraint")
        rules = {field.name: field.metadata["rule"] for field in fields(cls)}
        for name in value:
            if name not in rules:
                raise InvalidParameter(FIELD, f"{excerpt(name)} is not one of {', '.join(rules)}")
        return cls(**{name: rules[name].from_json(member) for name, member in value.items()})

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        members = [name for name in names if getattr(self, name) is not None]
        if len(members) != 1:
            found = " and ".join(members) or "none"
            raise InvalidParameter(FIELD, f"set exactly one of {', '.join(names)}, not {found}")
        field = next(field for field in fields(self) if field.name == members[0])
        try:
            field.metadata["rule"].check(field.name, getattr(self, field.name))
        except InvalidParameter as error:
            raise InvalidParameter(FIELD, str(error)) from error

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def json_schema(self) -> str:
        """The JSON text of `json`."""
        return self.json if isinstance(self.json, str) else json.dumps(self.json)

    @property
    def content(self) -> tuple[str, str]:
        """Kind and text. Constraints with the same content allow the same outputs."""
        if self.kind == "json":
            return "json", self.json_schema
        return self.kind, json.dumps(getattr(self, self.kind))


def _check_depth(name: str, schema: object) -> None:
    """Level by level: recursion could overflow the stack."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise InvalidParameter(name, f"must be nested at most {MAX_DEPTH} levels deep")


def _to_finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits:.40} is too large")
    return number


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r:.40} appears twice")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
