"""Which parser reads the outputs of a request with tools, and the ids of its calls."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from api.tool_calls.formats import ID_LENGTHS, CallList, parser_factory
from api.tool_calls.parser import NamedCall, PlainText, ToolCallParser

Functions = Sequence[tuple[str, Mapping[str, Any] | None]]
"""Names and schemas of parameters."""


@dataclass(frozen=True, slots=True)
class CallReading:
    """How calls are read from the text.

    `mode`: `none`, there are none; `auto`, in the format of the model; `required`, a list of calls, and
    `named`, the arguments of the function `name`, both by grammar. `parallel`: whether more than one may be.
    """

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parallel: bool = True

    def new_parser(self, functions: Functions, tool_format: str) -> Callable[[], ToolCallParser]:
        """Returns what creates a parser for each output."""
        if self.mode == "none":
            return PlainText
        if self.mode == "named":
            return lambda: NamedCall(self.name)
        if self.mode == "required":
            return CallList
        return parser_factory(tool_format, functions, parallel=self.parallel)


def call_id(task_id: str, output: int, number: int, tool_format: str) -> str:
    """The id of call `number` of an output: the same for every reply that shows it."""
    digest = hashlib.sha256(f"{task_id}:{output}:{number}".encode()).hexdigest()
    length = ID_LENGTHS.get(tool_format)
    return f"call_{digest[:24]}" if length is None else digest[:length]
