"""The HTTP server: Waitress with limits that protect it from slow and hostile clients.

One I/O thread reads requests and writes replies; a pool of threads runs the application. Invariants: a
separate thread answers liveness, however busy the others are. A new connection is always accepted: if
necessary, a connection that is idle or has not sent a complete request is closed for it.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from api.http.connections import Connection, Deadlines
from api.http.poller import Poller
from api.http.requests import MAX_HEAD_BYTES, RequestParser
from api.http.uploads import Uploads
from api.networks import network_of
from api.problems import Problem
from api.shutdown import Shutdown
from tokenmill.settings.declarations import ApiSettings

_log = structlog.get_logger(__name__)

PROBE_PATH = "/livez"
PROBE_CONNECTIONS = 64
"""Connections accepted beyond the limit. They are answered on `PROBE_PATH` only."""
TICK_SECONDS = 0.25
KEEP_ALIVE_IDLE_SECONDS = 15
ACCEPTS_AT_ONCE = 64
RECEIVE_BYTES = 64 * 1024
REPLY_BYTES = 256 * 1024
"""Unread bytes of a connection at which the thread that writes its reply waits."""
BUFFERED_BYTES = 256 * 1024 * 1024
"""Limit on unanswered requests and unread replies in all. Beyond it, stalled connections are closed."""
STALLED_SECONDS = 1.0
RETRY_SECONDS = 5
"""Retry-After of a request that exceeds a limit."""


def adjustments(
    settings: ApiSettings, listener: socket.socket, uploads: Uploads | None = None
) -> Adjustments:
    """Waitress's settings. Only uploads are buffered in temporary files: the disk may be full."""
    adjusted = Adjustments(
        sockets=[listener],
        threads=settings.http_threads,
        ident="tokenmill",
        recv_bytes=RECEIVE_BYTES,
        outbuf_high_watermark=REPLY_BYTES,
        outbuf_overflow=1 << 40,
        inbuf_overflow=1 << 40,
        max_request_header_size=MAX_HEAD_BYTES,
        # The smallest size that is refused.
        max_request_body_size=settings.max_body_bytes + 1,
        # Reading during a call detects a disconnect.
        channel_request_lookahead=1,
        log_socket_errors=False,
    )
    adjusted.uploads = uploads
    return adjusted


class HttpServer(TcpWSGIServer):  # type: ignore[misc]  # Waitress ships no types
    """Serves a bound socket until `shutdown` is requested.

    `connection_limit`: connections in all. A connection beyond it, or beyond the limit for its address,
    replaces an idle one. If there is none, it is answered on `PROBE_PATH` and refused with 503 elsewhere.
    `uploads`: how file uploads are received; None: as any other request.
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
        uploads: Uploads | None = None,
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
        """`connection`: the one that the current thread serves."""
        self._accepts_from = 0.0
        self._is_full = False
        super().__init__(
            application,
            map=dispatchers,
            _sock=listener,
            adj=adjustments(settings, listener, uploads),
            sockinfo=(listener.family, listener.type, listener.proto, listener.getsockname()),
            bind_socket=False,
        )

    @property
    def connections(self) -> list[Connection]:
        return list(self.active_channels.values())

    def run(self) -> None:
        """Serve until a stop is requested, then finish the calls in progress within the grace period."""
        self.poller.update_all()
        while not self._shutdown.requested:
            self._turn()
        self._stop_listening()
        deadline = time.monotonic() + self._grace_seconds
        while time.monotonic() < deadline and any(connection.is_busy for connection in self.connections):
            self._turn()

    def pull_trigger(self) -> None:
        """Called by Waitress in a thread that has changed the state of the connection it serves."""
        connection = getattr(self.serving, "connection", None)
        if connection is not None:
            self.poller.changed(connection)
        super().pull_trigger()

    def _stop_listening(self) -> None:
        self.accepting = False
        self.poller.unregister(self._fileno)
        self.del_channel()
        self.socket.close()

    def wake(self) -> None:
        """Make `run` check `shutdown` now. A signal handler may call this."""
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
        except Exception:  # noqa: BLE001 - it is logged
            # An error of one connection must not end the others.
            _log.exception("closing a connection after an internal error")
            connection.abort()

    # Choosing the thread of a call.

    def add_task(self, task: Connection) -> None:
        """Queue a connection whose request is complete. Any thread may call this."""
        request = task.requests[0]
        is_probe = request.path == PROBE_PATH
        if request.error is None and not is_probe:
            self._refuse_beyond_limits(task, request)
        # Refusals are as cheap as probes and must not queue for threads that wait for Redis.
        is_short = is_probe or request.error is not None
        (self._probes if is_short else self.task_dispatcher).add_task(task)

    def _refuse_beyond_limits(self, connection: Connection, request: RequestParser) -> None:
        if connection.probes_only:
            detail = "too many connections are open; try again"
            request.fail(Problem(503, "too_many_connections", detail, retry_after=RETRY_SECONDS))
        elif self._is_full and request.buffered_bytes:
            detail = "too many large requests are in progress; try again"
            request.fail(Problem(503, "busy", detail, retry_after=RETRY_SECONDS))

    # Limits on connections.

    def set_socket_options(self, conn: socket.socket) -> None:
        """Make the system detect clients that vanish without closing their connection, also an idle one."""
        super().set_socket_options(conn)
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": KEEP_ALIVE_IDLE_SECONDS,
            "TCP_KEEPINTVL": KEEP_ALIVE_IDLE_SECONDS,
            # Later than this server's own deadline, which resets the connection.
            "TCP_USER_TIMEOUT": min(round(self._deadlines.write_seconds * 2000), 2**31 - 1),
        }
        for name, value in options.items():
            # Not every platform has all of them.
            if hasattr(socket, name):
                conn.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def readable(self) -> bool:
        return bool(self.accepting) and time.monotonic() >= self._accepts_from

    def handle_accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted = self.accept()
            except OSError as error:
                # Most likely the process has too many open files.
                if not self._make_room(self.connections):
                    _log.warning("cannot accept a connection", error=str(error))
                    self._accepts_from = time.monotonic() + TICK_SECONDS
                return
            if accepted is None:
                return
            self._admit(*accepted)

    def _admit(self, client: socket.socket, address: Any) -> None:
        try:
            self.set_socket_options(client)
        except OSError:
            # The client has closed it already.
            client.close()
            return
        probes_only = self._is_over_limit(network_of(address[0]))
        if probes_only and len(self.active_channels) >= self._connection_limit + PROBE_CONNECTIONS:
            client.close()
            return
        connection = self.channel_class(self, client, address, self.adj, map=self._map)
        connection.network = network_of(address[0])
        connection.probes_only = probes_only
        self.poller.changed(connection)

    def _is_over_limit(self, network: str) -> bool:
        """Whether one more connection from `network` exceeds a limit, after closing idle ones for it."""
        own = [connection for connection in self.connections if connection.network == network]
        if self._address_limit and not self._reduce(own, self._address_limit):
            return True
        return not self._reduce(self.connections, self._connection_limit)

    def _reduce(self, connections: list[Connection], limit: int) -> bool:
        """Close idle `connections` until fewer than `limit` are open. Returns whether that succeeded."""
        return all(self._make_room(connections) for _ in range(len(connections) - limit + 1))

    def _make_room(self, connections: list[Connection]) -> bool:
        """Close the longest idle connection of the network with the most idle ones. False: none is idle."""
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
                    _log.warning("closing a stalled connection", buffered_bytes=sizes[connection])
                    total -= sizes[connection]
                    connection.abort()
        self._is_full = total > BUFFERED_BYTES
