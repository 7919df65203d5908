"""Grammars in GBNF, Lark and regular expressions, and the errors that users see."""

from typing import Any

import pytest

from engine.structured_outputs import StructuredOutputs
from tests.tiny_grammars import BYTE_LEVEL, EOS_IDS, KINDS, bytes_to_ids


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u0041\u00e9\u000a\u005c\u0022"', 'Aé\n\\"'),
        (r"root ::= [\u0041-\u0043]+", "ABC"),
        (r'root ::= "\\u0041"', r"\u0041"),
        ('root ::= a-b ws "x"\na-b ::= "q" | [0-9] # one\nws ::= [ \\t\\n]*', "q \nx"),
        ("root ::= sum\nsum ::= num (\"+\" num)*\nnum ::= [0-9]+ | \"(\" sum \")\"", "1+(2+33)"),
        ('?start: "a" B\nB: /[bc]+/', "abcb"),
        ("start: /[0-9]+/ // digits", "12"),
        ("start: x*\nx: \"a\" | \"::=\"", "a::="),
    ],
)  # fmt: skip
def test_gbnf_and_lark_are_read(grammar: str, text: str) -> None:
    assert BYTE_LEVEL.mask(StructuredOutputs(grammar=grammar), text) & EOS_IDS


@pytest.mark.parametrize(
    ("regex", "text", "fits"),
    [
        ("^ab$", "ab", True), ("a|b", "b", True), (r"a\/b", "a/b", True), ("a/b", "a/b", True),
        (r"\d", "٣", False), (r"\d\w", "3_", True), ("//", "//", True), (".", "\n", False),
        ("(?s).", "\n", True), ("(?i)x", "X", True),
    ],
)  # fmt: skip
def test_regular_expressions_match_the_whole_text(regex: str, text: str, fits: bool) -> None:
    grammar = BYTE_LEVEL.backend.compile(StructuredOutputs(regex=regex))()
    if fits:
        grammar.advance(bytes_to_ids(text))
        assert grammar.is_complete
    else:
        with pytest.raises(ValueError, match="satisfy the grammar"):
            grammar.advance(bytes_to_ids(text))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "text"}}, "^json: Invalid type: text"),
    ({"json": {"$ref": "#/$defs/a"}}, "does not exist"),
    ({"json": {"$ref": "https://example.org/a"}}, r"^json: the keyword `\$ref` .at #. leads to"),
    ({"json": {"$ref": "#"}}, "no text fits it"),
    ({"json": "false"}, "not supported|Unsatisfiable"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"type": "array", "uniqueItems": True}}, "^json: the keyword `uniqueItems` .at #. is not"),
    (
        {"json": {"type": "string", "format": "isbn"}},
        "the keyword `format` .at #. is not supported with 'isbn'",
    ),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "^json: the keyword `not`"),
    ({"regex": "["}, "^regex: .*unclosed character class"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "a^b"}, "lookaround"),
    ({"regex": "(" * 1000 + "a" + ")" * 1000}, "^regex: "),
    ({"grammar": 'root ::= ("a"'}, "^grammar: is not valid GBNF: Expected"),
    ({"grammar": 'root ::= "a\\'}, "is not valid GBNF"),
    ({"grammar": r'root ::= "\ud800"'}, "is not valid GBNF"),
    ({"grammar": "root ::= other"}, "'other' not found"),
    ({"grammar": 'top ::= "a"'}, "No 'root' rule"),
    ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "root is defined twice"),
    ({"grammar": "root ::= root"}, "no text fits it"),
    ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "is not valid GBNF"),
    ({"grammar": "start: other"}, "other"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
    ({"grammar": "hello"}, "^grammar: .*Expected"),
    ({"grammar": "start: <|im_end|>"}, '^grammar: "<.im_end.>" is a special token'),
    ({"json": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}, "^json: the keyword `oneOf` .*use `anyOf`"),
    ({"json": {"properties": {"a": {"items": {"not": {}}}}}}, "`not` .at #/properties/a/items."),
    (
        {"json": {"properties": {"a": {"format": "date"}, "b": {"format": "x y"}}}},
        "`format` .at #/properties/b. .*'x y'",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_grammar_is_explained(fields: dict[str, Any], message: str) -> None:
    """vllm#43920. Nothing is silently ignored."""
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        BYTE_LEVEL.backend.compile(StructuredOutputs(**fields))
    assert len(str(caught.value)) <= 500
    for switch in ("no_forcing", "coerce_one_of", "lenient", "option", "fuel", "registry", "⟦"):
        assert switch not in str(caught.value)
    assert BYTE_LEVEL.backend.compile(KINDS["choice"])() is not None
