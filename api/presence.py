"""The client of a call as its connection shows it, and how many may wait. Knows no route.

Law: to ask whether someone is there costs no wait and takes nothing from the connection.
"""

import contextlib
import socket
import threading
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
    """So many calls may wait at once; the threads beyond are kept for the short ones."""

    def __init__(self, number: int) -> None:
        self._free = threading.BoundedSemaphore(number)

    @contextlib.contextmanager
    def take(self) -> Iterator[bool]:
        """Whether there was a place; it is given back at the end."""
        taken = self._free.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._free.release()
