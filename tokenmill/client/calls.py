"""HTTP calls as steps for a driver to perform, so that the two clients share all decisions. No I/O here.

Invariant: a call that may have taken effect is repeated only if repeating it changes nothing: reads,
cancellations, and submissions, which have an idempotency key.
"""

import logging
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

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
from tokenmill.client.steps import Pause, Request, Send

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
Calls = Generator[Send | Pause, Any, _Result]
"""Steps of a call, which return its result."""


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
            if isinstance(error, Broken) and not request.repeatable:
                raise
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


def is_empty(response: httpx.Response) -> bool:
    """Whether the reply is `204 No Content`."""
    return response.status_code == HTTPStatus.NO_CONTENT


def wait(path: str, policy: RetryPolicy, timeout: float | None) -> Calls[Any]:
    """The `httpx.Response` with the ended task. `timeout`: seconds. Raises `ClientError`."""
    limit = WaitLimit("task", timeout, policy.clock)
    while True:
        asked_at = policy.clock()
        seconds = limit.reduce(POLL_SECONDS)
        request = Request(method="GET", path=path, params={"wait": f"{seconds:g}"}, timeout=seconds)
        response = yield from call(request, policy, patient=True)
        if parse(response, Status).status in ENDED:
            return response
        limit.check(request)
        pause = _poll_pause(response, policy.clock() - asked_at)
        if pause > 0:
            yield Pause(limit.reduce(pause))


class WaitLimit:
    """How long to wait for a `what`. `timeout`: seconds; None: for ever."""

    def __init__(self, what: str, timeout: float | None, clock: Clock) -> None:
        self._what = what
        self._timeout = timeout
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout

    def reduce(self, seconds: float) -> float:
        """`seconds`, or what is left if that is less."""
        return seconds if self._deadline is None else max(0.0, min(seconds, self._deadline - self._clock()))

    def check(self, request: Request) -> None:
        """Raises `WaitTimedOut`."""
        if self._deadline is not None and self._clock() >= self._deadline:
            raise WaitTimedOut(
                f"the {self._what} has not ended after {self._timeout:g} seconds; it continues",
                request_id=request.request_id,
            )


def _poll_pause(response: httpx.Response, waited: float) -> float:
    """Seconds until the next poll. Without a free slot for a waiting call the service answers at once."""
    if response.headers.get(WAIT_HEADER) == "skipped":
        after = response.headers.get("retry-after", "")
        return float(after) if after.isdecimal() else LAST_RETRY_SECONDS
    return POLL_PAUSE_SECONDS if waited < POLL_PAUSE_SECONDS else 0.0


class Status(Reply):
    """The one field of a task or batch that waiting looks at."""

    status: str
