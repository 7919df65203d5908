"""Tool calls as models write them, in pieces of every size."""

from collections.abc import Callable
from typing import Any

import pytest

from api.tool_calls.formats import CallList, parser_factory
from api.tool_calls.parser import CallDelta, NamedCall, TextDelta, ToolCallParser

FUNCTIONS: list[tuple[str, Any]] = [
    ("weather", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    ("stop", None),
]
Calls = list[tuple[str, str]]


def read(new_parser: Callable[[], ToolCallParser], text: str, size: int) -> tuple[str, Calls]:
    """The text and the calls, from pieces of `size` characters."""
    parser = new_parser()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallDelta) and part.name is not None:
            assert part.index == len(calls)
            calls.append([part.name, part.arguments])
        elif isinstance(part, CallDelta):
            calls[part.index][1] += part.arguments
    return (
        "".join(part.text for part in parts if isinstance(part, TextDelta)),
        [(name, arguments) for name, arguments in calls],
    )


CASES: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Par}is \\"x", "days": 3}}'
        '\n</tool_call>\n<tool_call>\n{"arguments": {}, "name": "stop"}\n</tool_call>',
        "Sure.",
        [("weather", '{"city": "Par}is \\"x", "days": 3}'), ("stop", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call> and then', "and then", [("stop", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("stop", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {"a": [1, 2', "", [("stop", '{"a": [1, 2')]),
    ("hermes", '<tool_call>\n{"foo": 1}\n</tool_call>', '<tool_call>{"foo": 1}\n</tool_call>', []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", "x <tool_call> hm", "x <tool_call> hm", []),
    ("hermes", "  plain text \n", "  plain text \n", []),
    (
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\nPa\nris\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", '{"city": "Pa\\nris", "days": 3}')],
    ),
    ("hermes", "<function=stop>\n</function>", "", [("stop", "{}")]),
    (
        "llama3",
        '{"name": "stop", "parameters": {"a": 1}}; {"name": "weather", "parameters": {}}',
        "",
        [("stop", '{"a": 1}'), ("weather", "{}")],
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "stop", "parameters": {"a": 1}}',
        "",
        [("stop", '{"a": 1}')],
    ),
    ("llama3", '{"answer": 42} is it', '{"answer": 42} is it', []),
    ("llama3", 'see {"name"}', 'see {"name"}', []),
    ("llama3", ' {"name": "st', '{"name": "st', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "stop", "arguments": {"a": 1}}, {"name": "weather", "arguments": {}}]',
        "",
        [("stop", '{"a": 1}'), ("weather", "{}")],
    ),
    (
        "mistral",
        'Now: [TOOL_CALLS]stop[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{}',
        "Now:",
        [("stop", '{"a": {"b": "}"}}'), ("weather", "{}")],
    ),
    ("mistral", "a [TOOL", "a [TOOL", []),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_pieces_of_every_size_give_the_same(tool_format: str, text: str, content: str, calls: Calls) -> None:
    new_parser = parser_factory(tool_format, FUNCTIONS, parallel=True)
    for size in range(1, len(text) + 1):
        assert read(new_parser, text, size) == (content, calls), size


@pytest.mark.parametrize("case", [case for case in CASES if len(case[3]) > 1])
def test_without_parallel_calls_only_the_first_is_kept(case: tuple[str, str, str, Calls]) -> None:
    tool_format, text, content, calls = case
    new_parser = parser_factory(tool_format, FUNCTIONS, parallel=False)
    assert read(new_parser, text, 3) == (content, calls[:1])


def test_required_calls_are_a_list() -> None:
    text = '[{"name"\t: "stop" , "parameters" : \n{"a": 1} }, {"name":"weather","parameters":{"city":"x"}}]'
    calls = [("stop", '{"a": 1}'), ("weather", '{"city":"x"}')]
    for size in range(1, len(text) + 1):
        assert read(CallList, text, size) == ("", calls)


def test_a_named_call_is_its_arguments() -> None:
    assert read(lambda: NamedCall("stop"), '{"a": 1}', 2) == ("", [("stop", '{"a": 1}')])


def test_arguments_arrive_while_they_are_written() -> None:
    parser = parser_factory("hermes", FUNCTIONS, parallel=True)()
    assert parser.feed('<tool_call>{"name": "stop", "arguments": {"a": "long te') == [
        CallDelta(0, "stop", ""),
        CallDelta(0, None, '{"a": "long te'),
    ]
    assert parser.feed("xt") == [CallDelta(0, None, "xt")]
