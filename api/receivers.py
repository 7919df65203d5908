"""Which receivers of webhooks do not answer.

Law: one that lets its callers wait in vain is waited for by a few of them only, so that the others are told
in time. One that answers, whatever it answers, may have them all. Knows no webhook.
"""

import threading
from collections import Counter

from api.webhook_url import Target

MAX_IN_VAIN = 4
MAX_REMEMBERED = 10_000

Receiver = tuple[str, int]


class Receivers:
    """Of one process, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: Counter[Receiver] = Counter()
        self._silent: set[Receiver] = set()

    def enter(self, target: Target) -> bool:
        """Whether one more may call; then `leave` must follow."""
        receiver = (target.host, target.port)
        with self._lock:
            if receiver in self._silent and self._callers[receiver] >= MAX_IN_VAIN:
                return False
            self._callers[receiver] += 1
            return True

    def leave(self, target: Target, *, answered: bool) -> None:
        receiver = (target.host, target.port)
        with self._lock:
            self._callers[receiver] -= 1
            if not self._callers[receiver]:
                del self._callers[receiver]
            if answered:
                self._silent.discard(receiver)
            elif len(self._silent) < MAX_REMEMBERED:
                self._silent.add(receiver)
