"""One connection of the HTTP server: reads requests and writes replies, each within a deadline.

Invariants: the I/O thread never waits for a client, and no application thread waits for a request. A
connection that is closed after a reply first discards what the client still sends, so that the reply is not
lost.
"""

import contextlib
import json
import socket
import struct
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
from waitress.channel import HTTPChannel
from waitress.task import ErrorTask, WSGITask

from api.http.requests import RequestParser
from api.problems import MEDIA_TYPE, Problem, retry_seconds

if TYPE_CHECKING:
    from api.http.server import HttpServer

KEEP_ALIVE_SECONDS = 75.0
"""Idle connections are kept this long. It exceeds the time that proxies keep theirs (nginx: 60), so a proxy
never sends a request on a connection that is being closed."""
LINGER_SILENCE_SECONDS = 2.0
LINGER_SECONDS = 30.0
LINGER_BYTES = 64 * 1024 * 1024
"""Limits on discarding input after the last reply: time without data, total time, bytes."""
SEND_BYTES = 128 * 1024
_NO_LINGER = struct.pack("ii", 1, 0)
MIN_BODY_BYTES_PER_SECOND = 4096
"""A body that arrives at this rate or faster never times out."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """`read_seconds`: to receive a request. Each `MIN_BODY_BYTES_PER_SECOND` of its body add one second.

    `write_seconds`: without progress while a client reads a reply.
    """

    read_seconds: float
    write_seconds: float


_log = structlog.get_logger(__name__)


class ReplyTask(WSGITask):  # type: ignore[misc]  # Waitress ships no types
    """Calls the application for one request."""

    def finish(self) -> None:
        if self.request.command == "HEAD":
            # A reply to HEAD has no body and thus no final chunk.
            self.chunked_response = False
        super().finish()


class ErrorReplyTask(ErrorTask):  # type: ignore[misc]  # Waitress ships no types
    """Answers an invalid request with problem details (RFC 9457) and closes the connection."""

    def execute(self) -> None:
        problem = self.request.error
        if not isinstance(problem, Problem):
            problem = Problem(500, "internal_error", "internal error of this service")
        request_id = uuid.uuid4().hex
        body = json.dumps(problem.to_json(request_id)).encode()
        self.status = f"{problem.status} {HTTPStatus(problem.status).phrase}"
        self.response_headers += [("Content-Type", MEDIA_TYPE), ("X-Request-ID", request_id)]
        if problem.retry_after is not None:
            self.response_headers.append(("Retry-After", str(retry_seconds(problem.retry_after))))
        _log.info(
            "call refused",
            method=self.request.command,
            status=problem.status,
            code=problem.code,
            request_id=request_id,
            client=self.channel.addr[0] if self.channel.addr else None,
        )
        self.set_close_on_finish()
        self.content_length = len(body)
        if self.request.command != "HEAD":
            self.write(body)


class Connection(HTTPChannel):  # type: ignore[misc]  # Waitress ships no types
    """A client's connection. The I/O thread calls every method but `service` and `write_soon`."""

    task_class = ReplyTask
    error_task_class = ErrorReplyTask
    parser_class = RequestParser
    server: "HttpServer"
    request: RequestParser | None

    def __init__(
        self,
        server: "HttpServer",
        sock: socket.socket,
        addr: Any,
        adj: Any,
        map: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__(server, sock, addr, adj, map=map)
        # Bytes that each attempt to send copies.
        self.sendbuf_len = SEND_BYTES
        self._reading_since = self.last_progress = time.monotonic()
        self._has_served = False
        self._waiting_to_write = False
        self._linger_until: float | None = None
        self._lingered_bytes = 0
        self.ended_by_client = False
        """The client has closed its side, perhaps for sending only: `shutdown(SHUT_WR)`."""
        self.probes_only = False
        """The connection exceeds a limit: only liveness is answered on it."""
        self.network = ""
        """Set by the server: the address or network that counts as one client."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered or its reply is being read."""
        return bool(self.requests or self.total_outbufs_len)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of unanswered requests and unread replies."""
        requests = [*self.requests, *([self.request] if self.request is not None else [])]
        return int(self.total_outbufs_len + sum(request.buffered_bytes for request in requests))

    def check_client_disconnected(self) -> bool:
        """Whether the client of the current call has disconnected. Any thread may call this."""
        return self.ended_by_client or not self.connected

    def stalls(self, now: float, seconds: float) -> bool:
        """Whether the client has made no progress for `seconds` although it could."""
        is_due = now - self.last_progress >= seconds
        return is_due and bool(self.total_outbufs_len or not self.requests)

    # Reading.

    def readable(self) -> bool:
        if self._linger_until is not None:
            return True
        if self.will_close or self.close_when_flushed or self.ended_by_client:
            return False
        # Read on during a call, up to one more request, to notice that the client disconnects.
        if self.requests:
            return len(self.requests) <= int(self.adj.channel_request_lookahead)
        return not self.total_outbufs_len

    def handle_read(self) -> None:
        try:
            # The base class's `recv` would close the connection when the client ends its side.
            data = self.socket.recv(self.adj.recv_bytes)
        except BlockingIOError:
            return
        except OSError:
            self.handle_close()
            return
        if self._linger_until is not None:
            self._discard(data)
        elif data:
            self._parse(data)
        else:
            self._end_of_input()

    def _parse(self, data: bytes) -> None:
        now = time.monotonic()
        self.last_progress = now
        if self.request is None:
            self._reading_since = now
        self.received(data)

    def _end_of_input(self) -> None:
        self.ended_by_client = True
        if self.request is not None and self.request.has_begun and not self.is_busy:
            self.refuse(Problem(400, "incomplete_request", "the request is incomplete"))
        elif not self.is_busy:
            self.handle_close()

    def refuse(self, error: Problem) -> None:
        """Answer the request, of which only a part may have arrived, with `error`."""
        with self.requests_lock:
            request, self.request = self.request or RequestParser(self.adj), None
            request.fail(error)
            self.requests.append(request)
            if len(self.requests) == 1:
                self.server.add_task(self)

    # Writing.

    def service(self) -> None:
        """Answer one request. Called by an application thread."""
        self._has_served = True
        self.server.serving.connection = self
        super().service()
        if self.ended_by_client and not self.requests:
            self.close_when_flushed = True
            self.server.pull_trigger()

    def send(self, data: bytes, do_close: bool = True) -> int:
        """Called by the thread that holds the output lock."""
        sent = int(super().send(data, do_close=do_close))
        if sent:
            self.last_progress = time.monotonic()
        return sent

    def handle_write(self) -> None:
        if self._linger_until is not None or self.socket is None:
            return
        self._flush_exception(self._flush_some_if_lockable)
        if self.socket is None:
            # The client had reset the connection, so the flush closed it.
            return
        if self.will_close:
            self.handle_close()
        elif self.close_when_flushed and not self.total_outbufs_len and not self.requests:
            self._linger()

    def writable(self) -> bool:
        if self._linger_until is not None:
            return False
        return bool(self.total_outbufs_len or self.will_close or self.close_when_flushed)

    # Closing.

    def _linger(self) -> None:
        """Close the sending side and read on: closing with unread bytes would reset the connection, and the
        client could lose the reply.
        """
        if self.ended_by_client:
            self.handle_close()
            return
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.handle_close()
            return
        self.last_progress = time.monotonic()
        self._linger_until = self.last_progress + LINGER_SECONDS

    def _discard(self, data: bytes) -> None:
        self._lingered_bytes += len(data)
        self.last_progress = time.monotonic()
        if not data or self._lingered_bytes > LINGER_BYTES:
            self.handle_close()

    def handle_close(self) -> None:
        if self.socket is not None:
            self.server.poller.unregister(self._fileno)
            super().handle_close()

    def abort(self) -> None:
        """Close with a reset. Otherwise the system would keep the bytes that the client does not read."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.handle_close()

    # Deadlines.

    def check_deadlines(self, now: float, deadlines: Deadlines) -> None:
        """Called by the I/O thread several times a second."""
        if self._linger_until is not None:
            if now >= self._linger_until or now - self.last_progress >= LINGER_SILENCE_SECONDS:
                self.handle_close()
        elif self.is_busy:
            # The deadline of the next request starts when this one has ended.
            self._reading_since = now
            self._check_writing(now, deadlines.write_seconds)
        elif self.ended_by_client:
            self.handle_close()
        elif not self.close_when_flushed:
            self._check_reading(now, deadlines.read_seconds)

    def _check_writing(self, now: float, seconds: float) -> None:
        if not self.total_outbufs_len:
            self._waiting_to_write = False
        elif not self._waiting_to_write:
            # The deadline starts with the first unread byte.
            self._waiting_to_write = True
            self.last_progress = now
        elif now - self.last_progress >= seconds:
            self.abort()

    def _check_reading(self, now: float, seconds: float) -> None:
        partial = self.request
        if partial is None or not partial.has_begun:
            if now - self.last_progress >= (KEEP_ALIVE_SECONDS if self._has_served else seconds):
                self.handle_close()
            return
        part = "body" if partial.headers_finished else "head"
        granted = seconds + partial.wire_bytes / MIN_BODY_BYTES_PER_SECOND
        if now - self._reading_since >= granted:
            detail = f"the {part} of the request did not arrive within {granted:.0f} seconds"
            self.refuse(Problem(408, f"{part}_timeout", detail, param="body" if part == "body" else None))
