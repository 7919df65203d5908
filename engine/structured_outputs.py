"""What the whole text of an output must look like, as a user says it.

Law: whatever a user sends becomes one constraint of bounded size, or an `InvalidParameter` that says which
part is wrong. Knows no grammar library: whether a grammar compiles is seen later, off the step loop.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.errors import InvalidParameter

FIELD = "structured_outputs"
MAX_BYTES = 65_536
"""The longest text of one constraint, in UTF-8."""
MAX_CHOICES = 1_000
MAX_DEPTH = 100
"""The deepest nesting of a JSON schema, each object and each list counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """One constraint on the text of an output; exactly one field is given (vLLM's field of the same name).

    `json`: a JSON schema, as an object or as JSON text. `json_object`: True: any JSON object. `regex`: a
    regular expression that the whole text matches, as in the `pattern` of a JSON schema: `\\d` and `\\w` are
    ASCII, no look-around, no back references. `choice`: the texts to choose from. `grammar`: a grammar whose
    start symbol is `root` (GBNF, as llama.cpp defines it) or `start` (Lark, as llguidance reads it).

    Raises `InvalidParameter`.
    """

    json: Mapping[str, object] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    @classmethod
    def from_json(cls, value: object) -> "StructuredOutputs":
        """The constraint in a JSON object with one of the fields; null is not given."""
        if not isinstance(value, Mapping):
            raise InvalidParameter(FIELD, "must be an object with one constraint")
        names = [field.name for field in fields(cls)]
        for name in value:
            if name not in names:
                raise InvalidParameter(FIELD, f"{name!r:.40} is none of {', '.join(names)}")
        choice = value.get("choice")
        return cls(**{**value, "choice": tuple(choice) if isinstance(choice, list) else choice})

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise InvalidParameter(FIELD, f"give exactly one of {names}, not {' and '.join(given) or 'none'}")
        check = getattr(self, f"_check_{given[0]}")
        check()

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def json_schema(self) -> str:
        """The schema as JSON text, for `json`."""
        return self.json if isinstance(self.json, str) else json.dumps(self.json)

    @property
    def content(self) -> tuple[str, str]:
        """Kind and text; two with the same content allow the same texts."""
        if self.kind == "json":
            return "json", self.json_schema
        return self.kind, json.dumps(getattr(self, self.kind))

    def _check_json(self) -> None:
        if not isinstance(self.json, (str, Mapping)):
            raise InvalidParameter(FIELD, "json: must be a JSON schema: an object, or its JSON text")
        try:
            # Refuses numbers that JSON cannot write, and what holds itself.
            text = self.json if isinstance(self.json, str) else json.dumps(self.json, allow_nan=False)
            schema = json.loads(
                text, parse_constant=_no_json, parse_float=_finite, object_pairs_hook=_without_repetition
            )
        except InvalidParameter:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidParameter(FIELD, f"json: is no JSON: {error}") from error
        if not isinstance(schema, (dict, bool)):
            raise InvalidParameter(FIELD, "json: a JSON schema is an object")
        _shallow(schema)
        # Of what is said, however it was spelled; a lone surrogate may hide behind an escape until here.
        _bounded("json", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise InvalidParameter(FIELD, "json_object: must be true where it is given")

    def _check_regex(self) -> None:
        _text("regex", self.regex)

    def _check_choice(self) -> None:
        if not isinstance(self.choice, (tuple, list)) or not self.choice:
            raise InvalidParameter(FIELD, "choice: must be a list of at least one text")
        if len(self.choice) > MAX_CHOICES:
            raise InvalidParameter(FIELD, f"choice: must have at most {MAX_CHOICES} texts")
        for text in self.choice:
            _text("choice", text)
        _bounded("choice", "".join(self.choice))

    def _check_grammar(self) -> None:
        _text("grammar", self.grammar)


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(FIELD, f"{name}: must be text that is not empty")
    _bounded(name, value)


def _bounded(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        # Half of a surrogate pair is a str in Python and no text anywhere else.
        raise InvalidParameter(
            FIELD, f"{name}: is no valid Unicode text: a lone surrogate at {error.start}"
        ) from error
    if size > MAX_BYTES:
        raise InvalidParameter(FIELD, f"{name}: must be at most {MAX_BYTES} bytes, not {size}")


def _shallow(schema: object) -> None:
    """Level by level, so that depth costs no stack."""
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
    raise InvalidParameter(FIELD, f"json: must be nested at most {MAX_DEPTH} deep")


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


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
