"""Translates structured outputs into llguidance's Lark grammars, and the library's errors for users.

What the library does not support is an error, never ignored.
"""

import json
import re
from collections import Counter
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from engine.requests.json_schemas import find_keyword, rewrite_schema
from engine.structured_outputs import StructuredOutputs

# Between two parts of a JSON text. Unbounded, a model can write blank lines until its tokens run out.
WHITESPACE = r"[ \t\n\r]{1,64}"
# Any tokenization of an allowed text is allowed. To force tokens the library would need the tokenizer.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
MAX_ERROR = 400


def to_lark(structured_outputs: StructuredOutputs) -> str:
    """A Lark grammar with start symbol `start`. Raises `ValueError` with the name of the field."""
    try:
        return _start_of(structured_outputs) + NO_FORCING
    except ValueError as error:
        raise ValueError(f"{structured_outputs.kind}: {error}"[:MAX_ERROR]) from error


def explain(error: str, structured_outputs: StructuredOutputs | None = None) -> str:
    """The library's error for a user, with the name of the field, or None while the text is generated.

    Drops the library's listing of the grammar, its line numbers in our translation, and its options.
    """
    first, *others = error.splitlines() or [""]
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    text = " ".join([re.sub(r"^at \d+\(\d+\): ", "", first), *reasons])
    for pattern, message in _MESSAGES:
        if match := pattern.search(text):
            text = message.format(*match.groups())
            break
    if structured_outputs is not None:
        text = f"{structured_outputs.kind}: {_with_pointer(text, structured_outputs)}"
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."


_MESSAGES = [
    (re.compile(pattern), message)
    for pattern, message in (
        (r"^NoExtension(?:Bias)?$", "no text fits it"),
        (r"Unimplemented keys: \[\"([^\"]*)\"", "the keyword `{0}` is not supported"),
        (
            r"Unknown format: (.*)",
            "the keyword `format` is not supported with {0!r}; leave it out, or use `pattern`",
        ),
        (
            r"oneOf constraints are not supported",
            "the keyword `oneOf` needs alternatives that differ; use `anyOf`",
        ),
        (
            r"Resource '(.*?)' is not present",
            "the keyword `$ref` leads to {0!r}, which is not in this schema",
        ),
        (r"unknown special token: (\"[^\"]*\")", "{0} is a special token, which no text has"),
        (r"(?i)too (?:big|many|large|complex)|fuel", "it is too large; simplify it"),
        (r"^failed to compile JSON schema: (.*)", "{0}"),
        (r"^invalid regex .*? \(in regex\): (.*)", "{0}"),
    )
]


def _with_pointer(text: str, structured_outputs: StructuredOutputs) -> str:
    """`text` with the JSON pointer of the keyword that it names."""
    match = re.match(r"the keyword `(.*?)` (?:is not supported with|leads to)? ?(?:'(.*?)')?", text)
    if not match or structured_outputs.json is None or "(at " in text:
        return text
    pointer = find_keyword(json.loads(structured_outputs.json_schema), match[1], match[2])
    return text if pointer is None else text.replace(f"`{match[1]}`", f"`{match[1]}` (at {pointer})", 1)


def _start_of(outputs: StructuredOutputs) -> str:
    if outputs.regex is not None:
        # \d and \w match ASCII only, as in the patterns of JSON schemas.
        return f"start: /{regex_to_lark(outputs.regex, 'dw')}/"
    if outputs.choice is not None:
        return "start: " + " | ".join(map(json.dumps, outputs.choice))
    if outputs.grammar is not None:
        return _grammar(outputs.grammar)
    return _json({"type": "object"} if outputs.json is None else json.loads(outputs.json_schema))


def _json(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    schema = rewrite_schema(schema)
    options = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    # Overwrites options of the library that the user may have put there.
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


def _grammar(text: str) -> str:
    if is_lark_syntax(text) or "::=" not in text:
        return text
    rules = Counter(re.findall(r"(?m)^[ \t]*([\w-]+)\s*::=", text))
    if repeated := [rule for rule, count in rules.items() if count > 1]:
        raise ValueError(f"{repeated[0]} is defined twice")
    try:
        return gbnf_to_lark(_ESCAPE.sub(_unescape, text))
    except Exception as error:
        # The library's converter raises any exception for unexpected input.
        raise ValueError(f"is not valid GBNF: {error}") from error


# Matches every escape, so that an escaped backslash does not begin another one.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _unescape(escape: re.Match[str]) -> str:
    """Replace `\\uXXXX` and `\\UXXXXXXXX`, which the library's converter misreads, by the character."""
    code = escape[1] or escape[2]
    if code is None:
        return escape[0]
    character = chr(int(code, 16))
    character.encode()
    return character if character.isalnum() or ord(character) > 127 else f"\\x{ord(character):02x}"
