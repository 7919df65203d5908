"""The client of a call as its connection shows it, and how many may wait. Knows no route.

Law: to ask whether someone is there costs no wait and takes nothing from the connection.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_IS_GONE = "waitress.client_disconnected"
"""Where the server puts into the WSGI environment what to ask for the client's presence."""


class Shutdown:
    """Set once by the server, from a signal handler: a plain attribute, so that no lock is taken there."""

    requested: bool = False


def client_is_gone(environ: Mapping[str, Any]) -> bool:
    """True if the client has closed the connection. False also where that cannot be seen from here."""
    is_gone: Callable[[], bool] | None = environ.get(_IS_GONE)
    return is_gone is not None and is_gone()


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
