"""The formats in which families of models write tool calls.

`hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5, Qwen 3); the same tag
around `<function=NAME><parameter=KEY>VALUE</parameter></function>` is read too (Qwen 3 Coder). `llama3`: JSON
objects, perhaps after `<|python_tag|>`, separated by semicolons. `mistral`: `[TOOL_CALLS]` and a list of
objects, or `[TOOL_CALLS]NAME[ARGS]{...}`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api.tool_calls.json_call import JsonScanner
from api.tool_calls.parser import FirstCallOnly, StateParser, ToolCallParser

DEFAULT_FORMAT = "hermes"
ID_LENGTHS = {"mistral": 9}
"""Length of a call's id where the chat template checks it."""


class TaggedCalls(StateParser):
    """Calls between `<tool_call>` and `</tool_call>`, as JSON or as XML. `functions`: their JSON schemas."""

    markers = ("<tool_call>", "<function=")

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._functions = functions
        self._properties: Mapping[str, Any] = {}
        self._num_parameters = 0

    def found_marker(self) -> None:
        if self.marker == "<function=":
            self.buffer = self.marker + self.buffer
            self.state = self._read_function
        else:
            self.state = self._read_start

    def after_object(self) -> None:
        self.state = self._read_close if self.follows_call else self.read_text

    def _read_start(self) -> bool:
        rest = self.buffer.lstrip()
        if "<function=".startswith(rest) and rest != "<function=":
            return False
        if rest.startswith("{"):
            self.buffer = rest
            self.start_object("<tool_call>")
        elif rest.startswith("<function="):
            self.buffer = rest
            self.state = self._read_function
        else:
            self.add_text("<tool_call>")
            self.state = self.read_text
        return True

    def _read_function(self) -> bool:
        match = re.match(r"<function=([^>]*)>", self.buffer)
        if not match:
            return False
        name = match[1].strip()
        schema = self._functions.get(name, {})
        self._properties = schema.get("properties") or {}
        self._num_parameters = 0
        self.start_call(name, "{")
        self.buffer = self.buffer[match.end() :]
        self.state = self._read_parameters
        return True

    def _read_parameters(self) -> bool:
        match = re.search(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>|</function>", self.buffer, re.DOTALL)
        if not match:
            return False
        self.buffer = self.buffer[match.end() :]
        if match[1] is None:
            self.add_arguments("}")
            self.state = self._read_close
            return True
        name = match[1].strip()
        separator = ", " if self._num_parameters else ""
        value = _parameter(match[2], self._properties.get(name))
        self.add_arguments(f"{separator}{json.dumps(name)}: {value}")
        self._num_parameters += 1
        return True

    def _read_close(self) -> bool:
        tag = "</tool_call>"
        self.buffer = self.buffer.lstrip()
        if not self.buffer or (len(self.buffer) < len(tag) and tag.startswith(self.buffer)):
            return False
        self.buffer = self.buffer.removeprefix(tag)
        self.state = self.read_text
        return True


def _parameter(text: str, schema: object) -> str:
    """The JSON of a parameter that is written as plain text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


class LlamaCalls(StateParser):
    """JSON objects at the start of the text, or after `<|python_tag|>`."""

    markers = ("<|python_tag|>",)

    def __init__(self) -> None:
        super().__init__()
        self.state = self._read_start

    def found_marker(self) -> None:
        self.state = self._read_start

    def after_object(self) -> None:
        self.state = self._read_next if self.num_calls else self.read_text

    def _read_start(self) -> bool:
        rest = self.buffer.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self.buffer = rest
            self.start_object()
        else:
            self.state = self.read_text
        return True

    def _read_next(self) -> bool:
        self.buffer = self.buffer.lstrip("; \n\t\r,")
        if not self.buffer:
            return False
        self.state = self._read_start
        return True


class CallList(StateParser):
    """A JSON list of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._read_list_start

    def after_object(self) -> None:
        self.state = self._read_item

    def _read_list_start(self) -> bool:
        self.buffer = self.buffer.lstrip()
        if not self.buffer.startswith("["):
            self.state = self.read_text if self.buffer else self.state
            return bool(self.buffer)
        self.buffer = self.buffer[1:]
        self.state = self._read_item
        return True

    def _read_item(self) -> bool:
        self.buffer = self.buffer.lstrip(", \n\t\r")
        if not self.buffer:
            return False
        if self.buffer.startswith("{"):
            self.start_object()
        else:
            self.buffer = self.buffer.removeprefix("]")
            self.state = self.read_text
        return True


class MistralCalls(CallList):
    """Calls after `[TOOL_CALLS]`."""

    markers = ("[TOOL_CALLS]",)

    def __init__(self) -> None:
        super().__init__()
        self.state = self.read_text
        self._scanner = JsonScanner()

    def found_marker(self) -> None:
        self.state = self._read_kind

    def _read_kind(self) -> bool:
        self.buffer = self.buffer.lstrip()
        if not self.buffer:
            return False
        if self.buffer.startswith("["):
            self.state = self._read_list_start
        elif self.buffer.startswith("{"):
            self.start_object("[TOOL_CALLS]")
        else:
            self.state = self._read_name
        return True

    def _read_name(self) -> bool:
        at = self.buffer.find("{")
        if at < 0:
            return False
        head = self.buffer[:at].partition("[ARGS]")[0]
        self.start_call(head.partition("[CALL_ID]")[0].strip())
        self.buffer = self.buffer[at:]
        self._scanner = JsonScanner()
        self.state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        for position, char in enumerate(self.buffer):
            self._scanner.step(char)
            if self._scanner.depth == 0:
                self.add_arguments(self.buffer[: position + 1])
                self.buffer = self.buffer[position + 1 :]
                self.state = self.read_text
                return True
        self.add_arguments(self.buffer)
        self.buffer = ""
        return False


def parser_factory(
    tool_format: str, functions: Sequence[tuple[str, Mapping[str, Any] | None]], *, parallel: bool
) -> Callable[[], ToolCallParser]:
    """Returns what creates a parser for each output. `functions`: names and schemas of parameters."""
    schemas = {name: schema or {} for name, schema in functions}

    def new_parser() -> ToolCallParser:
        parser: ToolCallParser
        if tool_format == "llama3":
            parser = LlamaCalls()
        elif tool_format == "mistral":
            parser = MistralCalls()
        else:
            parser = TaggedCalls(schemas)
        return parser if parallel else FirstCallOnly(parser)

    return new_parser
