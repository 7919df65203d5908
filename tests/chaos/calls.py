"""HTTP calls that are repeated until they succeed, as clients do while a service is disturbed.

A client may meet broken connections and 503 with Retry-After, and retries. Any other unexpected status is a
complaint.
"""

import http.client
import json
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any, NamedTuple

CALL_SECONDS = 30.0
PAUSE_SECONDS = 0.2
"""Shorter than the service asks for, so that clients call during its recovery."""

AWAY = (OSError, http.client.HTTPException)


class RunOver(Exception):
    """The run ended without a reply."""


class Answer(NamedTuple):
    status: int
    headers: Message
    body: Any


class Caller:
    """Calls the API on `port` of this machine until `over` is set. `complain` receives unexpected replies."""

    def __init__(self, port: int, over: threading.Event, complain: Callable[[str], None]) -> None:
        self._port = port
        self._over = over
        self.complain = complain

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> Answer:
        """Repeat the call until its status is one of `expected`. Raises `RunOver`."""
        while not self._over.is_set():
            try:
                answer = self._once(method, path, body, headers or {})
            except AWAY:
                self.pause()
                continue
            if answer.status in expected:
                return answer
            self.refuse(answer.status, answer.headers, f"{method} {path}")
        raise RunOver

    def open_stream(
        self, path: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Open a streaming reply. Raises the errors in AWAY."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CALL_SECONDS)
        try:
            connection.request("GET", path, headers=dict(headers))
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def refuse(self, status: int, headers: Message, what: str) -> None:
        """Check an unexpected reply, and pause before the next attempt."""
        if status != 503:
            self.complain(f"{what} was answered with {status}")
        elif not headers.get("Retry-After"):
            self.complain(f"{what} was answered with 503 without Retry-After")
        self.pause()

    def pause(self) -> None:
        self._over.wait(PAUSE_SECONDS)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def _once(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CALL_SECONDS)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        return Answer(response.status, response.headers, json.loads(text) if text else None)
