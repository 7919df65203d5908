"""Talks to a running service by HTTP. Standard library only.

Law: a broken connection loses nothing. Reading goes on from where it stopped; a submission carries an
idempotency key, so that asking again cannot make a second task. Knows the wire, not the command line.
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
_PASSING_STATUSES = frozenset({429, 502, 503, 504})
#: An event stream is never silent for longer; the service sends comments.
_SILENCE_SECONDS = 60.0
_FIRST_RETRY_SECONDS = 0.25
_LAST_RETRY_SECONDS = 5.0
_POLL_PAUSE_SECONDS = 1.0


class ClientError(Exception):
    """The service did not do what was asked."""


class Unreachable(ClientError):
    """No service answers there, or what answers is not one."""


class Broken(ClientError):
    """The connection broke under way: the service may or may not have done what was asked."""


class Refused(ClientError):
    """The service answered with an error: `status`, and `code` for programs."""

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


_Answer = TypeVar("_Answer")
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class Client:
    """A service at `url`. `api_key`: shown with each call. `timeout`: seconds of one call.

    `patience`: seconds for which reading a known task is tried again while the service is away.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 30.0
    patience: float = 60.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Raises ValueError, which does not repeat it, for a key that no header can carry."""
        if self.api_key and not _API_KEY.fullmatch(self.api_key):
            raise ValueError("api_key must be printable ASCII without spaces")

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a task; `body` has the fields of POST /v1/tasks. The task as it was accepted."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        try:
            return self._call("POST", "/v1/tasks", body=body, headers=headers)
        except Broken:
            return self._call("POST", "/v1/tasks", body=body, headers=headers)

    def is_ready(self) -> bool:
        """The service can take tasks and run them."""
        try:
            with self._open("GET", "/readyz", None, {}, self.timeout):
                return True
        except ClientError:
            return False

    def task(self, task_id: str, wait: float = 0.0) -> dict[str, Any]:
        """The task as it is now, or as it is when it ends within `wait` seconds."""
        query = f"?wait={wait:g}" if wait else ""
        return self._call("GET", _path(task_id) + query, timeout=self.timeout + wait)

    def wait(self, task_id: str, poll_seconds: float = 20.0) -> dict[str, Any]:
        """The task when it has ended, however long that takes."""
        while True:
            asked_at = self.clock()
            task = self._patiently(lambda: self.task(task_id, poll_seconds))
            if task.get("status") in TERMINAL:
                return task
            # A server without a free place for waiting calls answers at once.
            if self.clock() - asked_at < min(poll_seconds, _POLL_PAUSE_SECONDS):
                self.sleep(_POLL_PAUSE_SECONDS)

    def cancel(self, task_id: str) -> dict[str, Any]:
        """The task after the cancellation; one that had ended is left as it was."""
        return self._call("POST", _path(task_id) + "/cancel", body={})

    def events(self, task_id: str, after: int = -1) -> Iterator[Event]:
        """Every event with a `seq` above `after`, the terminal one last; reconnects as often as needed."""
        last = after
        while True:
            progress = False
            with self._patiently(partial(self._stream, task_id, last)) as response:
                if response.status == HTTPStatus.NO_CONTENT:
                    # The task has ended, and not above `last`.
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

    def _patiently(self, call: Callable[[], _Answer]) -> _Answer:
        """The call's answer; after a fault that may pass it is made again until patience ends."""
        deadline = self.clock() + self.patience
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                return call()
            except ClientError as error:
                final = isinstance(error, Refused) and error.status not in _PASSING_STATUSES
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
                answer = json.load(response)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(f"the connection to {self.url} broke: {error}") from error
        except ValueError as error:
            raise Unreachable(f"what answers at {self.url} is not Tokenmill") from error
        if not isinstance(answer, dict):
            raise Unreachable(f"what answers at {self.url} is not Tokenmill")
        return answer

    def _open(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> http.client.HTTPResponse:
        """An answer below 400, its body unread."""
        sent = {"Content-Type": "application/json", **headers} if data is not None else dict(headers)
        try:
            request = urllib.request.Request(  # noqa: S310 - the user's own address
                self.url.rstrip("/") + path, data=data, headers=sent, method=method
            )
            if self.api_key:
                # Not for another address to which this one might send the call.
                request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
            answer = _opener(self.url).open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _no_answer(self.url, error) from error
        return cast(http.client.HTTPResponse, answer)


def _opener(url: str) -> urllib.request.OpenerDirector:
    """A proxy of the environment is for the world outside, not for this machine. Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("the address must start with http:// or https://")
    if parts.hostname in ("127.0.0.1", "::1", "localhost"):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _no_answer(url: str, error: Exception) -> ClientError:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError | socket.gaierror | ValueError):
        return Unreachable(f"no Tokenmill answers at {url}, is it running? ({reason})")
    return Broken(f"no answer from {url}: {reason}")


def _path(task_id: str) -> str:
    return f"/v1/tasks/{quote(task_id, safe='')}"


def _events(response: http.client.HTTPResponse) -> Iterator[Event]:
    """Events until the stream ends, cleanly or not: the caller asks again either way."""
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
        # An event of a later version.
        return None


def _refused(error: urllib.error.HTTPError) -> Refused:
    """From a problem+json body; a proxy in between may have answered with anything else."""
    try:
        fields = json.loads(error.read(65536))
        code, message = str(fields["error"]["code"]), str(fields["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        code, message = "http_error", f"HTTP {error.code} {error.reason}"
    after = error.headers.get("Retry-After", "")
    return Refused(error.code, code, message, float(after) if after.isdigit() else None)
