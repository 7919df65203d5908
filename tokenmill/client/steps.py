"""The words between the logic of the HTTP clients, which has no I/O, and the transports, which perform it."""

import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Generic, TypeVar, cast

import httpx

_Result = TypeVar("_Result")


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file in a form, with further fields. `open`: opens it from the start, for each attempt."""

    name: str
    open: Callable[[], BinaryIO]
    fields: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call. `json`, `upload`: its body. `timeout`: seconds for the reply beyond the client's own timeout.

    `repeatable`: a second time changes nothing, so it is repeated even if the first may have taken effect.
    """

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    upload: Upload | None = None
    timeout: float = 0.0
    repeatable: bool = True
    request_id: str = field(default_factory=_new_id)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request. Result: the response, read to its end, or unread for a successful `stream`.

    An `httpx.HTTPError` is raised at this step.
    """

    request: Request
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for more of the open stream. Result: bytes, or b"" at its end.

    An `httpx.HTTPError` is raised at this step.
    """


@dataclass(frozen=True, slots=True)
class Pause:
    """Close the open stream and sleep for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """Yield `items` to the consumer before the next step."""

    items: Sequence[Any]


StreamSteps = Generator[Send | Pause | Receive | Deliver, Any, None]


class Progress(Generic[_Result]):
    """Where steps have come to: `step` is the one to perform, and None once `result` is there."""

    def __init__(self, steps: Generator[Any, Any, _Result]) -> None:
        self._steps = steps
        self.step: Any = None
        self._result: _Result | None = None
        self._advance(partial(next, steps))

    @property
    def result(self) -> _Result:
        return cast(_Result, self._result)

    def done(self, result: Any = None) -> None:
        """`step` returned `result`."""
        self._advance(partial(self._steps.send, result))

    def failed(self, error: httpx.HTTPError) -> None:
        """`step` raised `error`."""
        self._advance(partial(self._steps.throw, error))

    def _advance(self, resume: Callable[[], Any]) -> None:
        try:
            self.step = resume()
        except StopIteration as end:
            self.step, self._result = None, end.value
