"""Limits how many threads build long replies at once.

Invariants: a thread that builds a reply from a long log computes all the time, and each such thread delays
all others of the process, also the one that reads requests, by a switch interval of the interpreter. So a
few do so at once and the rest wait here. Of several tenants, one occupies at most half of the slots.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from api.problems import Problem

SLOTS = 4
WAIT_SECONDS = 30.0
"""Longer than a reply takes, also one that ends because Redis does not answer."""
RETRY_SECONDS = 5


class ReplySlots:
    """`is_shared`: there are several tenants. For any number of threads."""

    def __init__(self, *, is_shared: bool, slots: int = SLOTS, wait_seconds: float = WAIT_SECONDS) -> None:
        self._slots = slots
        self._slots_per_tenant = max(1, slots // 2) if is_shared else slots
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """A slot until the end of the block. Raises `Problem` (503) where none becomes free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(tenant), self._wait_seconds):
                detail = "too many replies are being built; try again"
                raise Problem(503, "busy", detail, retry_after=RETRY_SECONDS)
            self._taken[tenant] += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken[tenant] -= 1
                if not self._taken[tenant]:
                    del self._taken[tenant]
                self._changed.notify_all()

    def _is_free(self, tenant: str) -> bool:
        return self._taken.total() < self._slots and self._taken[tenant] < self._slots_per_tenant
