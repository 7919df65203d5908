"""An HTTP client of a running service, with the standard library only.

Invariant: a broken connection loses nothing. Reading resumes where it stopped, and a submission has an
idempotency key, so that repeating it does not create a second task.
"""

import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit

from tokenmill.client.sse import Frame, frames
from tokenmill.protocol.messages import Event, FinishedEvent, ProtocolError, decode

TERMINAL = frozenset({"completed", "failed", "cancelled"})
_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
_SILENCE_SECONDS = 60.0
"""Timeout of an event stream; the service sends comments more often."""
_FIRST_RETRY_SECONDS = 0.25
_LAST_RETRY_SECONDS = 5.0
_POLL_PAUSE_SECONDS = 1.0


class ClientError(Exception):
    """A call failed."""


class Unreachable(ClientError):
    """No server answers at the address, or one that is not Tokenmill."""


class Broken(ClientError):
    """The connection broke: the call may or may not have taken effect."""


class Refused(ClientError):
    """The service answered with an error. `status`: HTTP status. `code`: error code."""

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


_Result = TypeVar("_Result")
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class Client:
    """Calls the service at `url`. `api_key`: sent with each call. `timeout`: seconds per call.

    `patience`: seconds for which reads are retried while the service is unavailable.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 30.0
    patience: float = 60.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Raises ValueError, without the key, if it is not valid in a header."""
        if self.api_key and not _API_KEY.fullmatch(self.api_key):
            raise ValueError("api_key must be printable ASCII without spaces")

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a task and return it. `body`: fields of POST /v1/tasks."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        try:
            return self._call("POST", "/v1/tasks", body=body, headers=headers)
        except Broken:
            return self._call("POST", "/v1/tasks", body=body, headers=headers)

    def is_ready(self) -> bool:
        """Whether the service accepts tasks and can run them."""
        try:
            with self._open("GET", "/readyz", None, {}, self.timeout):
                return True
        except ClientError:
            return False

    def task(self, task_id: str, wait: float = 0.0) -> dict[str, Any]:
        """Return a task; with `wait`, once it has ended or after that many seconds."""
        query = f"?wait={wait:g}" if wait else ""
        return self._call("GET", _path(task_id) + query, timeout=self.timeout + wait)

    def wait(self, task_id: str, poll_seconds: float = 20.0) -> dict[str, Any]:
        """Return a task once it has ended, however long that takes."""
        while True:
            asked_at = self.clock()
            task = self._retry(lambda: self.task(task_id, poll_seconds))
            if task.get("status") in TERMINAL:
                return task
            # A server without a free thread for waiting answers at once.
            if self.clock() - asked_at < min(poll_seconds, _POLL_PAUSE_SECONDS):
                self.sleep(_POLL_PAUSE_SECONDS)

    def cancel(self, task_id: str) -> dict[str, Any]:
        """Cancel a task and return it. A task that has ended is unchanged."""
        return self._call("POST", _path(task_id) + "/cancel", body={})

    def events(self, task_id: str, after: int = -1) -> Iterator[Event]:
        """Yield the events with a `seq` above `after` until the task ends. Reconnects as often as needed."""
        last = after
        while True:
            progress = False
            with self._retry(partial(self._stream, task_id, last)) as response:
                if response.status == HTTPStatus.NO_CONTENT:
                    # The task has ended, and has no event after `last`.
                    return
                for event in _events(response):
                    if event.seq <= last:
                        continue
                    last, progress = event.seq, True
                    yield event
                    if isinstance(event, FinishedEvent) and event.done:
                        return
            if not progress:
                self.sleep(_LAST_RETRY_SECONDS)

    def _retry(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of `call`; repeat it after transient errors, for `patience` seconds."""
        deadline = self.clock() + self.patience
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                return call()
            except ClientError as error:
                final = isinstance(error, Refused) and error.status not in _RETRYABLE_STATUSES
                if final or self.clock() + delay > deadline:
                    raise
            self.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    def _stream(self, task_id: str, last: int) -> http.client.HTTPResponse:
        headers = {"Accept": "text/event-stream"}
        if last >= 0:
            headers["Last-Event-ID"] = str(last)
        return self._open("GET", _path(task_id) + "/events", None, headers, _SILENCE_SECONDS)

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._open(method, path, data, headers or {}, timeout or self.timeout) as response:
                result = json.load(response)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(f"the connection to {self.url} broke: {error}") from error
        except ValueError as error:
            raise Unreachable(f"the server at {self.url} is not Tokenmill") from error
        if not isinstance(result, dict):
            raise Unreachable(f"the server at {self.url} is not Tokenmill")
        return result

    def _open(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> http.client.HTTPResponse:
        """The response, with its body unread. Raises `ClientError` for an error status."""
        sent = {"Content-Type": "application/json", **headers} if data is not None else dict(headers)
        try:
            request = urllib.request.Request(  # noqa: S310 - the user's own URL
                self.url.rstrip("/") + path, data=data, headers=sent, method=method
            )
            if self.api_key:
                # Not sent to other hosts after a redirect.
                request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
            response = _opener(self.url).open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _no_answer(self.url, error) from error
        return cast(http.client.HTTPResponse, response)


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Calls to this machine use no proxy from the environment. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("the address must start with http:// or https://")
    if parts.hostname in ("127.0.0.1", "::1", "localhost"):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _no_answer(url: str, error: Exception) -> ClientError:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError | socket.gaierror | ValueError):
        return Unreachable(f"Tokenmill does not answer at {url}; is it running? ({reason})")
    return Broken(f"no answer from {url}: {reason}")


def _path(task_id: str) -> str:
    return f"/v1/tasks/{quote(task_id, safe='')}"


def _events(response: http.client.HTTPResponse) -> Iterator[Event]:
    """Events until the stream ends or breaks: the caller reconnects either way."""
    try:
        for frame in frames(response):
            if event := _event(frame):
                yield event
    except (OSError, http.client.HTTPException):
        return


def _event(frame: Frame) -> Event | None:
    try:
        return decode(frame.data)
    except ProtocolError:
        # An event of a newer version.
        return None


def _refused(error: urllib.error.HTTPError) -> Refused:
    """From a problem+json body; a proxy may have answered with anything else."""
    try:
        fields = json.loads(error.read(65536))
        code, message = str(fields["error"]["code"]), str(fields["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        code, message = "http_error", f"HTTP {error.code} {error.reason}"
    after = error.headers.get("Retry-After", "")
    return Refused(error.code, code, message, float(after) if after.isdecimal() else None)
