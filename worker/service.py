"""A thread that calls `turn` again and again until it is stopped.

Invariants: an error of Redis costs a pause and new connections, never the thread. Any other error ends the
thread and is reported.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol

import redis

from monitoring.worker import WorkerMetrics
from tokenmill.process.redis_outages import OutageLog

FIRST_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 1.0


class ServiceHost(Protocol):
    """What the services of a process share. `clock`: monotonic seconds. `outages` logs outages of Redis."""

    @property
    def metrics(self) -> WorkerMetrics: ...
    @property
    def outages(self) -> OutageLog: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    def thread_failed(self, thread: str, error: BaseException) -> None: ...


class Service:
    """`client`: the Redis client of this thread, if it has one. It is closed when the thread ends."""

    def __init__(self, name: str, turn: Callable[[], None], host: ServiceHost, client: Any = None) -> None:
        self.name = name
        self._turn = turn
        self._host = host
        self._client = client
        self._turn_began_at = self._succeeded_at = host.clock()
        self._stopping = threading.Event()
        self._pause = FIRST_PAUSE_SECONDS
        # A daemon, so that a turn that never returns does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._turn_began_at = self._succeeded_at = self._host.clock()
        self._thread.start()

    def is_stalled(self, seconds: float) -> bool:
        """Whether the current turn has taken longer than `seconds`. False once the thread has ended."""
        return self._thread.is_alive() and self._host.clock() - self._turn_began_at > seconds

    def is_failing(self, seconds: float) -> bool:
        """Whether no turn has succeeded for `seconds`, because it stalls or Redis fails."""
        return self._thread.is_alive() and self._host.clock() - self._succeeded_at > seconds

    def stop(self) -> None:
        """End the thread after its current turn."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the thread to end. Returns whether it has."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_turn()
        except BaseException as error:  # noqa: BLE001 - every error ends the worker and is reported
            self._host.thread_failed(self.name, error)
        finally:
            if self._client is not None:
                self._client.close()

    def _take_turn(self) -> None:
        try:
            self._turn()
        except redis.RedisError as error:
            self._recover(error)
        else:
            if self._client is not None:
                self._host.outages.worked()
            self._pause = FIRST_PAUSE_SECONDS
            self._succeeded_at = self._host.clock()
        self._turn_began_at = self._host.clock()

    def _recover(self, error: redis.RedisError) -> None:
        self._host.outages.failed(error)
        self._host.metrics.redis_error(self.name)
        if self._client is not None:
            # After a failover an old connection may lead to a read-only replica.
            self._client.connection_pool.disconnect()
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
