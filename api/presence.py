"""The client of a call as its connection shows it, and how many may wait. Knows no route.

Law: to ask whether someone is there costs no wait and takes nothing from the connection.
"""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

_SOCKETS = ("gunicorn.socket", "werkzeug.socket")
"""Where servers put the connection into the WSGI environment."""


class Shutdown:
    """Set once by the server, from a signal handler: a plain attribute, so that no lock is taken there."""

    requested: bool = False


def client_is_gone(environ: Mapping[str, Any]) -> bool:
    """True if the client has closed the connection. False also where that cannot be seen from here.

    Unread bytes hide the end behind them, as the last record of TLS does; the next write finds it then.
    """
    connection = _connection(environ)
    if connection is None:
        return False
    try:
        # The plain socket's method: that of a TLS socket refuses to peek.
        return not socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def silence_limit(environ: Mapping[str, Any], seconds: float) -> Iterator[None]:
    """Within, a read from the client that takes longer raises TimeoutError, where the server lets us."""
    connection = _connection(environ)
    if connection is None:
        yield
        return
    before = connection.gettimeout()
    connection.settimeout(seconds)
    try:
        yield
    finally:
        connection.settimeout(before)


def _connection(environ: Mapping[str, Any]) -> socket.socket | None:
    found = next((environ[name] for name in _SOCKETS if name in environ), None)
    return found if isinstance(found, socket.socket) else None


class Places:
    """Limits how many calls wait at once; the threads beyond are kept for short calls.

    `is_shared`: a tenant may have as many places as it leaves free, so that none takes all.
    """

    def __init__(self, number: int, *, is_shared: bool = False) -> None:
        self._number = number
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def take(self, tenant: str = "") -> Iterator[bool]:
        """Whether there was a place for `tenant`; it is returned at the end."""
        taken = self._acquire(tenant)
        try:
            yield taken
        finally:
            if taken:
                self._release(tenant)

    def _acquire(self, tenant: str) -> bool:
        with self._lock:
            free = self._number - self._taken.total()
            if free <= 0 or (self._is_shared and self._taken[tenant] >= free):
                return False
            self._taken[tenant] += 1
            return True

    def _release(self, tenant: str) -> None:
        with self._lock:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
