"""Threads that hang, and threads that Redis fails: who looks on can tell both from one that works."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from tests.worker.running import make_worker, running
from tests.worker.workshop import ended, submit, until
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.service import Service
from worker.watchdog import Watchdog


class Turns:
    """A service whose turns do as they are told, at a time that only the test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gate = threading.Semaphore(0)
        self.num_begun = 0
        self.fails = False
        self.service = Service(
            "turns",
            self.turn,
            on_redis_error=lambda _: None,
            on_failure=lambda *_: None,
            clock=lambda: self.now,
        )

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


def test_a_long_turn_hangs_until_it_ends() -> None:
    with turning() as turns:
        turns.now = 5.0
        assert (turns.service.hangs(4.9), turns.service.fails(4.9)) == (True, True)
        assert (turns.service.hangs(5.0), turns.service.fails(5.0)) == (False, False)
        turns.let_one_pass()
        assert (turns.service.hangs(0.0), turns.service.fails(0.0)) == (False, False)


def test_turns_that_redis_fails_do_not_hang_but_nothing_comes_of_them() -> None:
    with turning() as turns:
        turns.fails = True
        turns.now = 5.0
        turns.let_one_pass()
        assert (turns.service.hangs(0.0), turns.service.fails(4.0)) == (False, True)
        turns.fails = False
        turns.let_one_pass()
        assert not turns.service.fails(0.0)


def test_a_thread_that_has_ended_does_not_hang() -> None:
    with turning() as turns:
        pass
    turns.now = 100.0
    assert (turns.service.hangs(1.0), turns.service.fails(1.0)) == (False, False)


def test_ticks_count_for_nothing_while_another_thread_hangs() -> None:
    """The watchdog, which is armed for the last time, then ends the process."""
    now, armed, hanging = [0.0], list[float](), [False]
    watchdog = Watchdog(
        60.0, lambda: now[0], on_tick=lambda: None, is_hanging=lambda: hanging[0], arm=armed.append
    )
    watchdog.tick()
    hanging[0] = True
    for second in range(1, 62):
        now[0] = float(second)
        watchdog.tick()
    assert armed == [61.0]
    assert watchdog.is_stalled
    hanging[0] = False
    watchdog.tick()
    assert armed == [61.0, 61.0]
    assert not watchdog.is_stalled


class Deaf:
    """A client whose scripts find no Redis."""

    def __init__(self, client: Any, is_deaf: Callable[[], bool]) -> None:
        self._client = client
        self._is_deaf = is_deaf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register_script(self, script: Any) -> Any:
        call = self._client.register_script(script)

        def run(*args: Any, **options: Any) -> Any:
            if self._is_deaf():
                raise redis.ConnectionError("no route to host")
            return call(*args, **options)

        return run


@pytest.mark.parametrize("thread", ["intake", "publisher"])
def test_a_worker_with_a_thread_that_cannot_reach_redis_is_not_ready(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """Vexa#606: all looked healthy while nothing was done for those who waited."""
    monkeypatch.setattr("worker.threads.TROUBLE_SECONDS", 0.5)
    is_deaf = threading.Event()

    def connecting(name: str) -> Any:
        client = connect(redis_url, name)
        return Deaf(client, is_deaf.is_set) if name == thread else client

    store = TaskStore(redis_client)

    def record() -> tuple[str, str]:
        return next(((one.state, one.detail) for one in store.workers()), ("", ""))

    with running(redis_url, connecting=connecting) as run:
        until(lambda: record() == ("ready", ""), "it is ready")
        is_deaf.set()
        task = submit(redis_client)
        until(lambda: record() == ("stalled", f"nothing comes of: {thread}"), "it says that it is not")
        assert not run.worker.is_ready
        is_deaf.clear()
        ended(redis_client, task)
        until(lambda: record() == ("ready", "") and run.worker.is_ready, "it is ready again")


def test_a_worker_that_was_just_made_is_in_no_trouble(redis_url: str) -> None:
    worker = make_worker(redis_url)
    assert worker.condition == "ready"
