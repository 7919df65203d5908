"""The HTTP server: Waitress, whose I/O thread reads requests and writes replies while threads only run the
application, with limits that hold against clients of any kind.

Invariants: liveness is answered by a thread of its own, whatever the other threads and connections do. A new
connection is always accepted: one that is idle, or that has not sent a whole request, makes room for it.
"""

import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from api.http.connections import Connection, Deadlines
from api.http.poller import Poller
from api.http.requests import MAX_HEAD_BYTES, RequestError, RequestParser
from api.settings import ApiSettings
from api.streams.presence import Shutdown

logger = logging.getLogger(__name__)

PROBE_PATH = "/livez"
PROBE_CONNECTIONS = 64
"""Connections beyond the limit; they are answered on `PROBE_PATH` alone."""
TICK_SECONDS = 0.25
KEEP_ALIVE_IDLE_SECONDS = 15
ACCEPTS_AT_ONCE = 64
RECEIVE_BYTES = 64 * 1024
REPLY_BYTES = 256 * 1024
"""Unread bytes of a connection at which the thread that produces more of a reply waits."""
BUFFERED_BYTES = 256 * 1024 * 1024
"""Unanswered requests and unread replies of all connections. Beyond it, those that stall are closed."""
STALLED_SECONDS = 1.0


def adjustments(settings: ApiSettings, listener: socket.socket) -> Adjustments:
    """Waitress's own settings. Nothing is written to temporary files: there may be no room for them."""
    return Adjustments(
        sockets=[listener],
        threads=settings.http_threads,
        ident="tokenmill",
        recv_bytes=RECEIVE_BYTES,
        outbuf_high_watermark=REPLY_BYTES,
        outbuf_overflow=1 << 40,
        inbuf_overflow=1 << 40,
        max_request_header_size=MAX_HEAD_BYTES,
        # The first length that is refused.
        max_request_body_size=settings.max_body_bytes + 1,
        # So that a client that goes away is noticed while its call is in progress.
        channel_request_lookahead=1,
        log_socket_errors=False,
    )


class HttpServer(TcpWSGIServer):  # type: ignore[misc]  # Waitress ships no types
    """Answers calls on a bound socket until `shutdown` is requested.

    `connection_limit`: connections in all. One beyond it, or beyond the settings' limit for its address, is
    answered on `PROBE_PATH` and otherwise refused with 503, unless an idle one can be closed for it.
    """

    channel_class = Connection

    def __init__(
        self,
        application: Callable[..., Iterable[bytes]],
        settings: ApiSettings,
        listener: socket.socket,
        shutdown: Shutdown,
        *,
        connection_limit: int,
    ) -> None:
        self._shutdown = shutdown
        self._connection_limit = connection_limit
        self._address_limit = settings.max_connections_per_address
        self._deadlines = Deadlines(settings.http_read_seconds, settings.http_write_seconds)
        self._grace_seconds = settings.http_grace_seconds
        self._probes = ThreadedTaskDispatcher()
        self._probes.set_thread_count(1)
        self._checked_at = 0.0
        dispatchers: dict[int, Any] = {}
        self.poller = Poller(dispatchers)
        self.serving = threading.local()
        """`connection`: the one that this thread serves."""
        self._accepts_from = 0.0
        self._is_full = False
        super().__init__(
            application,
            map=dispatchers,
            _sock=listener,
            adj=adjustments(settings, listener),
            sockinfo=(listener.family, listener.type, listener.proto, listener.getsockname()),
            bind_socket=False,
        )

    @property
    def connections(self) -> list[Connection]:
        return list(self.active_channels.values())

    def run(self) -> None:
        """Until a stop was requested and the calls in progress have ended, or their grace is over."""
        self.poller.update_all()
        while not self._shutdown.requested:
            self._turn()
        self._stop_listening()
        deadline = time.monotonic() + self._grace_seconds
        while time.monotonic() < deadline and any(connection.is_busy for connection in self.connections):
            self._turn()

    def pull_trigger(self) -> None:
        """Called by Waitress in a thread that serves a connection whose state has changed."""
        connection = getattr(self.serving, "connection", None)
        if connection is not None:
            self.poller.changed(connection)
        super().pull_trigger()

    def _stop_listening(self) -> None:
        self.accepting = False
        self.poller.forget(self._fileno)
        self.del_channel()
        self.socket.close()

    def wake(self) -> None:
        """Have `run` look at `shutdown` now. May be called from a signal handler."""
        self.pull_trigger()

    def _turn(self) -> None:
        self.poller.poll(TICK_SECONDS)
        now = time.monotonic()
        if now - self._checked_at >= TICK_SECONDS:
            self._checked_at = now
            for connection in self.connections:
                self._check(connection, now)
            self._bound_memory(now)
            self.poller.update_all()

    def _check(self, connection: Connection, now: float) -> None:
        try:
            connection.check_deadlines(now, self._deadlines)
        except Exception:
            # A fault with one connection ends no other.
            logger.exception("a connection is closed")
            connection.abort()

    # Who is answered by which thread.

    def add_task(self, task: Connection) -> None:
        """A request of this connection is complete: have it answered. Called by any thread."""
        request = task.requests[0]
        is_probe = request.path == PROBE_PATH
        if request.error is None and not is_probe:
            self._refuse_beyond_limits(task, request)
        # Refusals are as cheap, and must not wait for threads that wait for Redis.
        is_short = is_probe or request.error is not None
        (self._probes if is_short else self.task_dispatcher).add_task(task)

    def _refuse_beyond_limits(self, connection: Connection, request: RequestParser) -> None:
        if connection.probes_only:
            detail = "too many connections are open; try again"
            request.fail(RequestError(503, "too_many_connections", detail))
        elif self._is_full and request.buffered_bytes:
            request.fail(RequestError(503, "busy", "too many large requests are in progress; try again"))

    # Who may connect.

    def set_socket_options(self, conn: socket.socket) -> None:
        """Let the system notice clients that vanish without a word, also while nothing is sent to them."""
        super().set_socket_options(conn)
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": KEEP_ALIVE_IDLE_SECONDS,
            "TCP_KEEPINTVL": KEEP_ALIVE_IDLE_SECONDS,
            # Later than this server's own deadline, which tells the client of it by a reset.
            "TCP_USER_TIMEOUT": min(round(self._deadlines.write_seconds * 2000), 2**31 - 1),
        }
        for name, value in options.items():
            # Not every system has all of them.
            if hasattr(socket, name):
                conn.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def readable(self) -> bool:
        return bool(self.accepting) and time.monotonic() >= self._accepts_from

    def handle_accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted = self.accept()
            except OSError as error:
                # Most likely too many files are open.
                if not self._make_room(self.connections):
                    logger.warning("a connection cannot be accepted: %s", error)
                    self._accepts_from = time.monotonic() + TICK_SECONDS
                return
            if accepted is None:
                return
            self._admit(*accepted)

    def _admit(self, client: socket.socket, address: Any) -> None:
        try:
            self.set_socket_options(client)
        except OSError:
            # It is closed already.
            client.close()
            return
        probes_only = self._is_over_limit(network(address[0]))
        if probes_only and len(self.active_channels) >= self._connection_limit + PROBE_CONNECTIONS:
            client.close()
            return
        connection = self.channel_class(self, client, address, self.adj, map=self._map)
        connection.network = network(address[0])
        connection.probes_only = probes_only
        self.poller.changed(connection)

    def _is_over_limit(self, place: str) -> bool:
        """Whether a connection from `place` is one too many, after room was made where that is possible."""
        own = [connection for connection in self.connections if connection.network == place]
        if self._address_limit and not self._reduce(own, self._address_limit):
            return True
        return not self._reduce(self.connections, self._connection_limit)

    def _reduce(self, connections: list[Connection], limit: int) -> bool:
        """Whether fewer than `limit` of them are open, after those that are not busy made room."""
        return all(self._make_room(connections) for _ in range(len(connections) - limit + 1))

    def _make_room(self, connections: list[Connection]) -> bool:
        """Close one of them that is not busy: of the address with most of those, the one silent longest."""
        idle = [one for one in connections if one.connected and not one.is_busy]
        if not idle:
            return False
        counts = Counter(one.network for one in idle)
        max(idle, key=lambda one: (counts[one.network], -one.last_progress)).handle_close()
        return True

    def _bound_memory(self, now: float) -> None:
        sizes = {connection: connection.buffered_bytes for connection in self.connections}
        total = sum(sizes.values())
        if total > BUFFERED_BYTES:
            for connection in sorted(sizes, key=lambda connection: connection.last_progress):
                if total > BUFFERED_BYTES and sizes[connection] and connection.stalls(now, STALLED_SECONDS):
                    logger.warning("a client that stalls with %d bytes is closed", sizes[connection])
                    total -= sizes[connection]
                    connection.abort()
        self._is_full = total > BUFFERED_BYTES


def network(address: str) -> str:
    """What one client holds: an IPv4 address, or the IPv6 network of 64 bits that its address is in."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))


def quiet_waitress() -> None:
    """Its warnings come once for each call when threads are short, and repeat paths as clients sent them."""
    logging.getLogger("waitress.queue").setLevel(logging.CRITICAL)
    logging.getLogger("waitress").setLevel(logging.ERROR)
