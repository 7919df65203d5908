"""Threads that stall and threads that Redis fails are distinguished from threads that work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import structlog

from tests.worker.fakes import ended, new_metrics, submit, until
from tests.worker.running import make_worker, running
from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.service import Service
from worker.watchdog import Watchdog


class Turns:
    """A service whose turns the test controls, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = new_metrics()
        self.clock: Callable[[], float] = lambda: self.now
        self.outages = OutageLog(structlog.get_logger(__name__), "test", self.clock)
        self.gate = threading.Semaphore(0)
        self.num_begun = 0
        self.fails = False
        self.service = Service("turns", self.turn, self)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        raise AssertionError(thread) from error

    def turn(self) -> None:
        self.num_begun += 1
        self.gate.acquire()
        if self.fails:
            raise redis.ConnectionError("away")

    def let_one_pass(self) -> None:
        begun = self.num_begun
        self.gate.release()
        until(lambda: self.num_begun > begun, "the next turn begins")


@contextmanager
def turning() -> Iterator[Turns]:
    turns = Turns()
    turns.service.start()
    until(lambda: turns.num_begun, "the first turn begins")
    try:
        yield turns
    finally:
        turns.service.stop()
        turns.gate.release()
        assert turns.service.join(60)


def test_a_long_turn_is_stalled_until_it_ends() -> None:
    with turning() as turns:
        turns.now = 5.0
        assert (turns.service.is_stalled(4.9), turns.service.is_failing(4.9)) == (True, True)
        assert (turns.service.is_stalled(5.0), turns.service.is_failing(5.0)) == (False, False)
        turns.let_one_pass()
        assert (turns.service.is_stalled(0.0), turns.service.is_failing(0.0)) == (False, False)


def test_turns_that_redis_fails_are_failing_but_not_stalled() -> None:
    with turning() as turns:
        turns.fails = True
        turns.now = 5.0
        turns.let_one_pass()
        assert (turns.service.is_stalled(0.0), turns.service.is_failing(4.0)) == (False, True)
        turns.fails = False
        turns.let_one_pass()
        assert not turns.service.is_failing(0.0)


def test_a_thread_that_has_ended_is_not_stalled() -> None:
    with turning() as turns:
        pass
    turns.now = 100.0
    assert (turns.service.is_stalled(1.0), turns.service.is_failing(1.0)) == (False, False)


class StalledThread:
    name = "stalled"

    def is_stalled(self, seconds: float) -> bool:
        return True

    def is_failing(self, seconds: float) -> bool:
        return True


def test_ticks_do_not_count_while_another_thread_stalls() -> None:
    """The watchdog is not armed again, and then ends the process."""
    now, armed = [0.0], list[float]()
    watchdog = Watchdog(60.0, lambda: now[0], new_metrics(), arm=armed.append)
    watchdog.tick()
    watchdog.watch([StalledThread()])
    for second in range(1, 62):
        now[0] = float(second)
        watchdog.tick()
    assert armed == [61.0]
    assert watchdog.is_stalled
    watchdog.watch([])
    watchdog.tick()
    assert armed == [61.0, 61.0]
    assert not watchdog.is_stalled


class Unreachable:
    """A client whose scripts fail while `is_away()`."""

    def __init__(self, client: Any, is_away: Callable[[], bool]) -> None:
        self._client = client
        self._is_away = is_away

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register_script(self, script: Any) -> Any:
        call = self._client.register_script(script)

        def run(*args: Any, **options: Any) -> Any:
            if self._is_away():
                raise redis.ConnectionError("no route to host")
            return call(*args, **options)

        return run


@pytest.mark.parametrize("thread", ["intake", "publisher"])
def test_a_worker_with_a_thread_that_cannot_reach_redis_is_not_ready(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """Vexa#606: all looked healthy while no waiting job was processed."""
    monkeypatch.setattr("worker.watchdog.FAILING_SECONDS", 2.0)
    is_away = threading.Event()

    def connect_thread(name: str) -> Any:
        client = connect(redis_url, name)
        return Unreachable(client, is_away.is_set) if name == thread else client

    store = TaskStore(redis_client)

    def record() -> tuple[str, str]:
        return next(((one.state, one.detail) for one in store.workers()), ("", ""))

    with running(redis_url, connect=connect_thread) as run:
        until(lambda: record() == ("ready", ""), "it is ready")
        is_away.set()
        task = submit(redis_client)
        until(lambda: record() == ("stalled", f"threads without progress: {thread}"), "it is stalled")
        assert run.worker.state == "stalled"
        is_away.clear()
        ended(redis_client, task)
        until(lambda: record() == ("ready", "") and run.worker.state == "ready", "it is ready again")


def test_a_new_worker_is_ready(redis_url: str) -> None:
    worker = make_worker(redis_url)
    assert worker.state == "ready"
