"""The interface of tool call parsers, and the states that the formats share.

A parser is fed the text of one output in pieces of any size. The deltas that it returns add up to the same
text and calls for every division into pieces, and to the arguments as the model wrote them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from api.tool_calls.json_call import JsonCall


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The start of call `index`, with its `name`, or more of its `arguments` (JSON text)."""

    index: int
    name: str | None
    arguments: str


Parts = list[TextDelta | CallDelta]


class ToolCallParser(Protocol):
    """Reads one output."""

    def feed(self, text: str) -> Parts: ...
    def finish(self) -> Parts:
        """What was held back. The output has ended."""
        ...


class PlainText:
    """An output without calls."""

    def feed(self, text: str) -> Parts:
        return [TextDelta(text)]

    def finish(self) -> Parts:
        return []


class NamedCall:
    """An output that consists of the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> Parts:
        name, self._name = self._name, None
        return [CallDelta(0, name, text)]

    def finish(self) -> Parts:
        return []


class FirstCallOnly:
    """Drops all calls but the first."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Parts:
        return [part for part in self._parser.feed(text) if _is_first(part)]

    def finish(self) -> Parts:
        return [part for part in self._parser.finish() if _is_first(part)]


def _is_first(part: TextDelta | CallDelta) -> bool:
    return isinstance(part, TextDelta) or part.index == 0


class StateParser:
    """A parser with a buffer and a state.

    A state is a method that consumes from the buffer. It returns False if it needs more text. White space
    between calls, and between text and a call, is dropped.
    """

    markers: tuple[str, ...] = ()
    """Texts that start a call."""

    def __init__(self) -> None:
        self.buffer = ""
        self.state: Callable[[], bool] = self.read_text
        self.num_calls = 0
        self._parts: Parts = []
        self._space = ""
        self.follows_call = False
        self.marker = ""
        self._call: JsonCall | None = None

    def feed(self, text: str) -> Parts:
        self.buffer += text
        return self._run()

    def finish(self) -> Parts:
        self._run()
        if self._call is not None and self._call.name is None:
            self.add_text(self.marker + self._call.raw)
        if self.state == self.read_text:
            self.add_text(self.buffer)
        if not self.num_calls and self._space:
            self._parts.append(TextDelta(self._space))
        self.buffer = self._space = ""
        self._call = None
        return self._take()

    def _run(self) -> Parts:
        while self.buffer and self.state():
            pass
        return self._take()

    def _take(self) -> Parts:
        parts, self._parts = self._parts, []
        return parts

    def found_marker(self) -> None:
        """Set the state that follows `marker`, which has been consumed."""
        raise NotImplementedError

    def after_object(self) -> None:
        """Set the state that follows the object of a call."""
        self.state = self.read_text

    # What states do.

    def add_text(self, text: str) -> None:
        text = self._space + text
        if self.follows_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self.follows_call = False
            self._parts.append(TextDelta(kept))

    def start_call(self, name: str, arguments: str = "") -> None:
        self._space = ""
        self.follows_call = True
        self._parts.append(CallDelta(self.num_calls, name, arguments))
        self.num_calls += 1

    def add_arguments(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallDelta(self.num_calls - 1, None, arguments))

    def start_object(self, marker: str = "") -> None:
        """Read an object from the buffer. `marker`: restored if the object is not a call."""
        self.marker = marker
        self._call = JsonCall()
        self.state = self.read_object

    # States.

    def read_text(self) -> bool:
        found = [(at, marker) for marker in self.markers if (at := self.buffer.find(marker)) >= 0]
        if not found:
            end = len(self.buffer) - self._held()
            self.add_text(self.buffer[:end])
            self.buffer = self.buffer[end:]
            return False
        at, marker = min(found)
        self.add_text(self.buffer[:at])
        self.buffer = self.buffer[at + len(marker) :]
        self.marker = marker
        self.found_marker()
        return True

    def read_object(self) -> bool:
        call = self._call
        assert call is not None, "start_object sets it"
        had_name = call.name is not None
        consumed = call.feed(self.buffer)
        self.buffer = self.buffer[consumed:]
        if call.name is not None:
            if not had_name:
                self.start_call(call.name)
            self.add_arguments(call.take_arguments())
        if not call.is_complete:
            return False
        if call.name is None:
            self.add_text(self.marker + call.raw)
        self._call = None
        self.after_object()
        return True

    def _held(self) -> int:
        """Length of the end of the buffer that may be the beginning of a marker."""
        longest = max((len(marker) for marker in self.markers), default=1)
        for length in range(min(longest - 1, len(self.buffer)), 0, -1):
            if any(marker.startswith(self.buffer[-length:]) for marker in self.markers):
                return length
        return 0
