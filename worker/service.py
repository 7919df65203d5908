"""A thread that takes turns until it is told to stop.

Law: an error of Redis costs a pause and fresh connections, never the thread; any other error ends the thread
and is told. Knows nothing of what a turn does.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from tokenmill.process.redis_outages import OutageLog

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0


class Service:
    """`client`: the thread's own, or None. `on_failure` gets the thread's name and what ended it.

    `outages`: where outages of Redis are logged, one for all threads of a worker. `clock`: seconds that
    never go back.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        *,
        client: Any = None,
        on_redis_error: Callable[[str], None],
        on_failure: Callable[[str, BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        outages: OutageLog | None = None,
    ) -> None:
        self.name = name
        self._outages = outages or OutageLog(logger, name, clock)
        self._turn = turn
        self._client = client
        self._on_redis_error = on_redis_error
        self._on_failure = on_failure
        self._clock = clock
        self._turned_at = self._succeeded_at = clock()
        self._stopping = threading.Event()
        self._pause = FIRST_PAUSE_SECONDS
        # A daemon: a turn that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._turned_at = self._succeeded_at = self._clock()
        self._thread.start()

    def hangs(self, seconds: float) -> bool:
        """Whether the turn under way has taken longer than that. A thread that has ended does not hang."""
        return self._thread.is_alive() and self._clock() - self._turned_at > seconds

    def fails(self, seconds: float) -> bool:
        """Whether no turn has worked for longer than that: it hangs, or Redis fails it."""
        return self._thread.is_alive() and self._clock() - self._succeeded_at > seconds

    def stop(self) -> None:
        """After the turn under way."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_turn()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the worker, and with its name
            self._on_failure(self.name, error)

    def _take_turn(self) -> None:
        try:
            self._turn()
        except redis.RedisError as error:
            self._recover(error)
        else:
            if self._client is not None:
                self._outages.worked()
            self._pause = FIRST_PAUSE_SECONDS
            self._succeeded_at = self._clock()
        self._turned_at = self._clock()

    def _recover(self, error: redis.RedisError) -> None:
        self._outages.failed(error)
        self._on_redis_error(self.name)
        if self._client is not None:
            # After a failover a connection may live on to a server that only reads.
            self._client.connection_pool.disconnect()
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
