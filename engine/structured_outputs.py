"""What the whole text of an output must look like, as a user says it. Knows no grammar library."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.errors import InvalidParameter

FIELD = "structured_outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """One constraint on the text of an output; exactly one field is given (vLLM's field of the same name).

    `json`: a JSON schema, as an object or as JSON text. `json_object`: True: any JSON object. `regex`: a
    regular expression that the whole text matches. `choice`: the texts to choose from. `grammar`: an EBNF
    grammar whose start symbol is `root` (GBNF, as llama.cpp defines it) or `start` (Lark).

    Raises `InvalidParameter`. Whether a grammar compiles is seen later, off the step loop.
    """

    json: Mapping[str, object] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

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

    def _check_json(self) -> None:
        if not isinstance(self.json, (str, Mapping)):
            raise InvalidParameter(FIELD, "json: must be a JSON schema: an object, or its JSON text")
        try:
            schema = json.loads(self.json_schema)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidParameter(FIELD, f"json: is no JSON: {error}") from error
        if not isinstance(schema, (dict, bool)):
            raise InvalidParameter(FIELD, "json: a JSON schema is an object")

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise InvalidParameter(FIELD, "json_object: must be true where it is given")

    def _check_regex(self) -> None:
        _text("regex", self.regex)

    def _check_choice(self) -> None:
        if not isinstance(self.choice, (tuple, list)) or not self.choice:
            raise InvalidParameter(FIELD, "choice: must be a list of at least one text")
        for text in self.choice:
            _text("choice", text)

    def _check_grammar(self) -> None:
        _text("grammar", self.grammar)


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(FIELD, f"{name}: must be text that is not empty")
