"""The client of a call as its connection shows it, and how many may wait. Knows no route.

Law: to ask whether someone is there costs no wait and takes nothing from the connection.
"""

import contextlib
import threading
from collections import Counter
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
