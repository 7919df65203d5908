"""The clock of Redis as a client knows it: an offset to the local monotonic clock, learned from TIME.

The estimate is never ahead of the clock of Redis, and behind it by at most the duration of the call that
learned it.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

LEARN_AGAIN_SECONDS = 10.0
"""The clock of a server may be set: an estimate is used for this time at most."""


class _TimedClient(Protocol):
    def time(self) -> Any: ...


class ServerClock:
    """For any number of threads. `clock`: seconds that never go back."""

    def __init__(self, client: _TimedClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._patience = _socket_timeout(client)
        # (seconds from the local clock to that of Redis, local time of the estimate); replaced, never
        # changed.
        self._estimate: tuple[float, float] | None = None

    def give_up_at(self) -> int | None:
        """When a call that begins now has timed out, in microseconds of the clock of Redis.

        None: the client never gives up. Raises the client's errors where the clock has to be learned.
        """
        if self._patience is None:
            return None
        began = self._clock()
        estimate = self._estimate
        if estimate is None or began - estimate[1] > LEARN_AGAIN_SECONDS:
            estimate = self._learn()
        return round((estimate[0] + self._clock() + self._patience) * 1e6)

    def forget(self) -> None:
        """Learn it again for the next call: the estimate was wrong."""
        self._estimate = None

    def _learn(self) -> tuple[float, float]:
        seconds, microseconds = self._client.time()
        now = self._clock()
        self._estimate = (seconds + microseconds / 1e6 - now, now)
        return self._estimate


def _socket_timeout(client: Any) -> float | None:
    """How long `client` waits for a reply; None where that is not known or has no end."""
    pool = getattr(client, "connection_pool", None)
    options = getattr(pool, "connection_kwargs", {})
    timeout = options.get("socket_timeout", options.get("orig_socket_timeout"))
    return None if timeout is None else float(timeout)
