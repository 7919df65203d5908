"""From what a user gave to a grammar in llguidance's Lark, and from its errors to words for the user.

Law: nothing that was asked for is left out silently: what the library cannot do is an error. Knows no tokens.
"""

import json
import re
from collections import Counter
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from engine.execution.text.json_schemas import place_of, rewritten
from engine.structured_outputs import StructuredOutputs

# Between two parts of a JSON text. Without a bound, a model can write blank lines until its tokens run out.
WHITESPACE = r"[ \t\n\r]{1,64}"
# Every spelling of an allowed text is allowed; the library would choose one by a tokenizer that it has not.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
MAX_ERROR = 400


def to_lark(structured_outputs: StructuredOutputs) -> str:
    """The grammar as Lark text, with start symbol `start`. Raises `ValueError`, which names the field."""
    try:
        return _start_of(structured_outputs) + NO_FORCING
    except ValueError as error:
        raise ValueError(f"{structured_outputs.kind}: {error}"[:MAX_ERROR]) from error


def explain(error: str, given: StructuredOutputs | None = None) -> str:
    """The library's error in words for the user of `given`, which is named; None: the text is being written.

    Without the library's listing of the grammar, its places in our text, and its switches, which no user has.
    """
    first, *others = error.splitlines() or [""]
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    text = " ".join([re.sub(r"^at \d+\(\d+\): ", "", first), *reasons])
    for pattern, words in _WORDS:
        if match := pattern.search(text):
            text = words.format(*match.groups())
            break
    if given is not None:
        text = f"{given.kind}: {_placed(text, given)}"
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."


_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
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


def _placed(text: str, given: StructuredOutputs) -> str:
    """`text` with the place in the schema of the keyword that it names."""
    match = re.match(r"the keyword `(.*?)` (?:is not supported with|leads to)? ?(?:'(.*?)')?", text)
    if not match or given.json is None or "(at " in text:
        return text
    place = place_of(json.loads(given.json_schema), match[1], match[2])
    return text if place is None else text.replace(f"`{match[1]}`", f"`{match[1]}` (at {place})", 1)


def _start_of(given: StructuredOutputs) -> str:
    if given.regex is not None:
        # As in the patterns of JSON schemas: ASCII digits and letters.
        return f"start: /{regex_to_lark(given.regex, 'dw')}/"
    if given.choice is not None:
        return "start: " + " | ".join(map(json.dumps, given.choice))
    if given.grammar is not None:
        return _grammar(given.grammar)
    return _json({"type": "object"} if given.json is None else json.loads(given.json_schema))


def _json(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    schema = rewritten(schema)
    options = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    # The library's own options are ours to set; to a JSON schema this is one more unknown word.
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


def _grammar(text: str) -> str:
    if is_lark_syntax(text) or "::=" not in text:
        return text
    rules = Counter(re.findall(r"(?m)^[ \t]*([\w-]+)\s*::=", text))
    if twice := [rule for rule, times in rules.items() if times > 1]:
        raise ValueError(f"{twice[0]} is defined twice")
    try:
        return gbnf_to_lark(_ESCAPE.sub(_spell_out, text))
    except Exception as error:
        # The library's converter has no error of its own for what it does not expect.
        raise ValueError(f"is no GBNF: {error}") from error


# All escapes, so that the second half of an escaped backslash is not taken for the start of another.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _spell_out(escape: re.Match[str]) -> str:
    """The character itself for `\\uXXXX` and `\\UXXXXXXXX`, which the library's converter gets wrong."""
    code = escape[1] or escape[2]
    if code is None:
        return escape[0]
    character = chr(int(code, 16))
    character.encode()
    return character if character.isalnum() or ord(character) > 127 else f"\\x{ord(character):02x}"
