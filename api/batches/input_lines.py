"""The lines of a batch's input file: their checks and their bodies. One line at a time is in memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from api.json_body import parse_object
from api.problems import Problem, excerpt

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Errors that a failed batch reports."""
MAX_ID_CHARACTERS = 512
_FRAMING_BYTES = 4096
"""What a line may have beside its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line that is not empty. `number`: from 0, of these lines. `position`: from 1, of all lines."""

    number: int
    position: int
    data: bytes


@dataclass(kw_only=True, eq=False)
class LineError(Exception):
    """Why a line makes its batch fail."""

    code: str
    message: str
    param: str | None = None
    position: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.position, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a valid line asks for."""

    custom_id: str
    body: dict[str, Any]


def read_lines(file: IO[bytes], max_body_bytes: int) -> Iterator[Line]:
    """The lines of a file. Raises `LineError` for a line that is too long."""
    limit = max_body_bytes + _FRAMING_BYTES
    number = position = 0
    while data := file.readline(limit + 1):
        position += 1
        if len(data) > limit:
            raise LineError(
                code="line_too_long", message=f"A line may have at most {limit} bytes.", position=position
            )
        if data.strip():
            yield Line(number=number, position=position, data=data)
            number += 1


def parse_line(line: Line, endpoint: str) -> Call:
    """Raises `LineError`."""
    try:
        values = parse_object(line.data)
    except Problem as problem:
        message = f"This line is not a JSON object: {problem.detail}."
        raise LineError(code="invalid_json_line", message=message, position=line.position) from None
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(values.get(name), kind) or not values[name]:
            code = "missing_required_parameter" if values.get(name) is None else "invalid_value"
            wanted = "a JSON object" if kind is dict else "a text that is not empty"
            raise _error(line, code, f"{name} must be {wanted}.", name)
    if len(values["custom_id"]) > MAX_ID_CHARACTERS:
        raise _error(line, "invalid_value", f"At most {MAX_ID_CHARACTERS} characters.", "custom_id")
    if values["method"] != "POST":
        raise _error(line, "invalid_method", "The method must be POST.", "method")
    if values["url"] != endpoint:
        message = f"The url {excerpt(values['url'])!r} is not the endpoint of the batch, {endpoint!r}."
        raise _error(line, "invalid_url", message, "url")
    return Call(custom_id=values["custom_id"], body=values["body"])


class Validation:
    """Checks the lines of a file one by one, before any of them runs."""

    def __init__(self, endpoint: str, model: str) -> None:
        self.errors: list[LineError] = []
        self.total = 0
        self._endpoint = endpoint
        self._model = model
        self._seen: set[bytes] = set()

    @property
    def is_over(self) -> bool:
        """Whether further lines cannot change the outcome."""
        return len(self.errors) >= MAX_ERRORS or self.total > MAX_LINES

    def add(self, line: Line) -> None:
        self.total += 1
        try:
            self._check(line)
        except LineError as error:
            self.errors.append(error)

    def finish(self) -> None:
        """Check what only the whole file shows."""
        if self.total > MAX_LINES:
            message = f"A batch may have at most {MAX_LINES} requests."
            self.errors.insert(0, LineError(code="too_many_requests", message=message))
        elif not self.total and not self.errors:
            self.errors.append(LineError(code="empty_file", message="The input file has no requests."))

    def _check(self, line: Line) -> None:
        call = parse_line(line, self._endpoint)
        digest = hashlib.sha256(call.custom_id.encode()).digest()[:16]
        if digest in self._seen:
            message = f"The custom_id {excerpt(call.custom_id)!r} appears on an earlier line too."
            raise _error(line, "duplicate_custom_id", message, "custom_id")
        self._seen.add(digest)
        model = call.body.get("model")
        if model is not None and model != self._model:
            shown = excerpt(model) if isinstance(model, str) else "this value"
            message = f"This service serves {self._model!r}, not {shown!r}."
            raise _error(line, "model_not_found", message, "body.model")


def _error(line: Line, code: str, message: str, param: str) -> LineError:
    return LineError(code=code, message=message, param=param, position=line.position)
