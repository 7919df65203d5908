"""Reads one JSON object that is a call, `{"name": ..., "arguments": {...}}`, as its text arrives."""

import json

ARGUMENTS = ("arguments", "parameters")


class JsonScanner:
    """Tracks strings and nesting, one character at a time."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def step(self, char: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class JsonCall:
    """`name`: None until it has been read. `raw`: the text so far. Arguments keep their spelling.

    Arguments that are a string with JSON in it are decoded at their end. A missing member is `{}`.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self._raw: list[str] = []
        self._scanner = JsonScanner()
        self._key: str | None = None
        self._text = ""
        self._space = ""
        self._arguments = ""
        self._has_arguments = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Read up to the end of the object. Returns the number of characters read."""
        for position, char in enumerate(text):
            self._raw.append(char)
            self._step(char)
            if self.is_complete:
                return position + 1
        return len(text)

    def take_arguments(self) -> str:
        """The arguments since the last call."""
        arguments, self._arguments = self._arguments, ""
        if self.is_complete and not self._has_arguments:
            self._has_arguments = True
            arguments = "{}"
        return arguments

    def _step(self, char: str) -> None:
        scanner = self._scanner
        was_inside = scanner.in_string
        scanner.step(char)
        at_member = scanner.depth == 1 and not was_inside and not scanner.in_string
        if scanner.depth == 0 and not was_inside:
            self._end_value()
            self.is_complete = True
        elif at_member and char == "," and self._key is not None:
            self._end_value()
        elif at_member and char == ":" and self._key is None:
            self._key, self._text, self._space = _loaded(self._text), "", ""
        elif self._key is None and char == "{" and scanner.depth == 1:
            pass
        else:
            self._add(char)

    def _add(self, char: str) -> None:
        """One character of a name or a value. White space around it is dropped."""
        if char.isspace() and not self._scanner.in_string and self._scanner.depth == 1:
            self._space += char if self._text else ""
            return
        char, self._space = self._space + char, ""
        self._text += char
        if self._key in ARGUMENTS and not self._text.startswith('"'):
            self._has_arguments = True
            self._arguments += char

    def _end_value(self) -> None:
        text, key = self._text, self._key
        self._text, self._space, self._key = "", "", None
        if key == "name":
            self.name = _loaded(text)
        elif key in ARGUMENTS and text.startswith('"'):
            self._has_arguments = True
            self._arguments += _loaded(text) or text


def _loaded(text: str) -> str | None:
    """The string of a JSON string literal; None if it is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
