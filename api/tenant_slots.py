"""Limits concurrent calls of an expensive operation, and shares the slots between tenants."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator


class TenantSlots:
    """`num_slots` slots for any number of threads.

    With `is_shared`, a tenant gets another slot only while it holds fewer than are free. One tenant alone
    thus holds at most half of them, and a tenant without a slot finds one as long as any is free.

    `wait_seconds`: how long `acquire` waits for a slot.
    """

    def __init__(self, num_slots: int, *, is_shared: bool = False, wait_seconds: float = 0.0) -> None:
        self.wait_seconds = wait_seconds
        self._num_slots = num_slots
        self._is_shared = is_shared
        self._changed = threading.Condition()
        self._held: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Slots in use."""
        with self._changed:
            return self._held.total()

    @contextlib.contextmanager
    def acquire(self, tenant: str = "") -> Iterator[bool]:
        """Hold a slot for the length of the block. False: none became free in time."""
        with self._changed:
            acquired = self._changed.wait_for(lambda: self._is_free(tenant), self.wait_seconds)
            if acquired:
                self._held[tenant] += 1
        try:
            yield acquired
        finally:
            if acquired:
                self._release(tenant)

    def _is_free(self, tenant: str) -> bool:
        free = self._num_slots - self._held.total()
        return free > 0 and not (self._is_shared and self._held[tenant] >= free)

    def _release(self, tenant: str) -> None:
        with self._changed:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
            self._changed.notify_all()
