"""An estimate of Redis's clock: an offset to the local monotonic clock, measured with TIME.

The estimate is never ahead of Redis's clock, and behind it by at most the duration of the TIME call.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

MAX_ESTIMATE_AGE_SECONDS = 10.0
"""A server's clock may be set, so an estimate is not used for longer."""


class _TimedClient(Protocol):
    def time(self) -> Any: ...


class ServerClock:
    """Thread-safe. `clock`: monotonic seconds."""

    def __init__(self, client: _TimedClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._timeout = _socket_timeout(client)
        # (Redis's clock minus the local clock, local time of the measurement); replaced as a whole.
        self._estimate: tuple[float, float] | None = None

    def timeout_at(self) -> int | None:
        """When a call that begins now times out, in microseconds on Redis's clock; None without a timeout.

        Raises the client's errors if it has to call TIME.
        """
        if self._timeout is None:
            return None
        began = self._clock()
        estimate = self._estimate
        if estimate is None or began - estimate[1] > MAX_ESTIMATE_AGE_SECONDS:
            estimate = self._measure()
        return round((estimate[0] + self._clock() + self._timeout) * 1e6)

    def forget(self) -> None:
        """Discard the estimate; the next call measures again."""
        self._estimate = None

    def _measure(self) -> tuple[float, float]:
        seconds, microseconds = self._client.time()
        now = self._clock()
        self._estimate = (seconds + microseconds / 1e6 - now, now)
        return self._estimate


def _socket_timeout(client: Any) -> float | None:
    """How long `client` waits for a reply; None if unknown or unlimited."""
    pool = getattr(client, "connection_pool", None)
    options = getattr(pool, "connection_kwargs", {})
    timeout = options.get("socket_timeout", options.get("orig_socket_timeout"))
    return None if timeout is None else float(timeout)
