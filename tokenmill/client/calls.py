"""HTTP calls as steps for a driver to perform, so that the two clients share all decisions. No I/O here.

Invariant: a call that may have taken effect is repeated only if repeating it changes nothing: reads,
cancellations, and submissions, which have an idempotency key.
"""

import logging
import random
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, TypeVar, cast

import httpx
from pydantic import ValidationError

from tokenmill.client.errors import (
    Broken,
    ClientError,
    NotTokenmill,
    Refused,
    Unreachable,
    WaitTimedOut,
    refused,
)
from tokenmill.client.replies import ENDED, Reply

logger = logging.getLogger("tokenmill.client")

MAX_RETRY_AFTER_SECONDS = 60.0
"""A longer pause than this is left to the caller."""
FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 5.0
POLL_SECONDS = 20.0
"""How long the service holds one poll of `wait`."""
POLL_PAUSE_SECONDS = 1.0
"""The least time between two polls: a service that is stopping answers at once."""
WAIT_HEADER = "tokenmill-wait"
_TRANSIENT = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})

_Reply = TypeVar("_Reply", bound=Reply)
_Result = TypeVar("_Result")
Clock = Callable[[], float]


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call. `json`: the body. `timeout`: seconds for the reply beyond the client's own timeout."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    timeout: float = 0.0
    request_id: str = field(default_factory=_new_id)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request. Result: the response, read to its end, or unread for a successful `stream`.

    An `httpx.HTTPError` is raised at this step.
    """

    request: Request
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Sleep for `seconds`."""

    seconds: float


Calls = Generator[Send | Pause, Any, _Result]
"""Steps of a call, which return its result."""


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


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """`max_retries`: of one call. `patience`: seconds for which waiting and streaming bridge an outage."""

    max_retries: int
    patience: float
    clock: Clock


class Backoff:
    """The pauses between the attempts of one call, or of one outage. Each is longer than the one before."""

    def __init__(self, policy: RetryPolicy, *, patient: bool) -> None:
        self._policy = policy
        self._patient = patient
        self.reset()

    def reset(self) -> None:
        """After success: the next failure is the first of a new outage."""
        self._num_failures = 0
        self._deadline: float | None = None

    def pause(self, error: ClientError) -> Pause:
        """The pause before the next attempt. Raises `error` if there is none."""
        self._num_failures += 1
        delay = min(FIRST_RETRY_SECONDS * 2 ** (self._num_failures - 1), LAST_RETRY_SECONDS)
        delay *= random.uniform(0.75, 1.0)  # noqa: S311 - spreads clients, no secret
        asked = (error.retry_after if isinstance(error, Refused) else None) or 0.0
        delay = max(delay, asked)
        if asked > MAX_RETRY_AFTER_SECONDS or not _is_transient(error) or self._is_over(delay):
            raise error
        if self._patient and self._num_failures == 1:
            logger.warning("%s; trying again for %g seconds", error, self._policy.patience)
        return Pause(delay)

    def _is_over(self, delay: float) -> bool:
        policy = self._policy
        if not self._patient:
            return self._num_failures > policy.max_retries
        now = policy.clock()
        if self._deadline is None:
            self._deadline = now + policy.patience
        return now + delay > self._deadline


def _is_transient(error: ClientError) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, Refused):
        if error.should_retry is not None:
            return error.should_retry
        return error.status in _TRANSIENT or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, Broken | Unreachable) and not isinstance(error, NotTokenmill)


def call(request: Request, policy: RetryPolicy, *, patient: bool = False, stream: bool = False) -> Calls[Any]:
    """The `httpx.Response` of a success. `patient`: bridge an outage. Raises `ClientError`."""
    backoff = Backoff(policy, patient=patient)
    while True:
        try:
            return (yield from attempt(request, stream=stream))
        except ClientError as error:
            pause = backoff.pause(error)
        yield pause


def attempt(request: Request, *, stream: bool = False) -> Calls[Any]:
    """The `httpx.Response` of a success. Raises `ClientError`."""
    try:
        response: httpx.Response = yield Send(request, stream)
    except httpx.HTTPError as error:
        raise no_answer(error, request) from error
    if response.is_success:
        return response
    if response.is_redirect:
        raise NotTokenmill(
            f"the server at {_origin(response)} redirects to {response.headers.get('location', '')!r}; use"
            " the address of the service itself",
            status=response.status_code,
            request_id=request.request_id,
        )
    raise refused(response.status_code, response.headers, response.content, request.request_id)


def no_answer(error: httpx.HTTPError, request: Request) -> ClientError:
    """The error of a call without a response."""
    origin = _origin(error)
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
        return Unreachable(
            f"Tokenmill does not answer at {origin}; is it running? ({reason})", request_id=request.request_id
        )
    if isinstance(error, httpx.TimeoutException):
        return Broken(f"no answer from {origin} in time", request_id=request.request_id)
    return Broken(f"the connection to {origin} broke: {reason}", request_id=request.request_id)


def _origin(found: httpx.HTTPError | httpx.Response) -> str:
    url = found.request.url
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def parse(response: httpx.Response, kind: type[_Reply]) -> _Reply:
    """Raises `NotTokenmill`."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise NotTokenmill(
            f"the server at {_origin(response)} is not Tokenmill, or of a version that this client does not"
            f" know ({where + ': ' if where else ''}{first['msg']})",
            status=response.status_code,
            request_id=response.headers.get("x-request-id"),
        ) from None


def wait(path: str, policy: RetryPolicy, timeout: float | None) -> Calls[Any]:
    """The `httpx.Response` with the ended task. `timeout`: seconds. Raises `ClientError`."""
    deadline = None if timeout is None else policy.clock() + timeout
    while True:
        asked_at = policy.clock()
        seconds = POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - asked_at))
        request = Request(method="GET", path=path, params={"wait": f"{seconds:g}"}, timeout=seconds)
        response = yield from call(request, policy, patient=True)
        if parse(response, _Status).status in ENDED:
            return response
        now = policy.clock()
        if deadline is not None and now >= deadline:
            raise WaitTimedOut(
                f"the task has not ended after {timeout:g} seconds; it continues",
                request_id=request.request_id,
            )
        pause = _poll_pause(response, now - asked_at)
        if pause > 0:
            yield Pause(pause if deadline is None else min(pause, deadline - now))


def _poll_pause(response: httpx.Response, waited: float) -> float:
    """Seconds until the next poll. Without a free slot for a waiting call the service answers at once."""
    if response.headers.get(WAIT_HEADER) == "skipped":
        after = response.headers.get("retry-after", "")
        return float(after) if after.isdecimal() else LAST_RETRY_SECONDS
    return POLL_PAUSE_SECONDS if waited < POLL_PAUSE_SECONDS else 0.0


class _Status(Reply):
    status: str
