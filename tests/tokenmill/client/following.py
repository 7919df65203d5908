"""Streams read in a thread, by iterator or asyncio, and the state of their readers in Redis."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import tokens
from tokenmill.client.streams import AsyncTokenStream, TokenStream
from tokenmill.protocol import keys
from tokenmill.protocol.messages import Event

WATCHDOG_SECONDS = 60.0


def by_iterator(*arguments: Any, **options: Any) -> Generator[Event, None, None]:
    return iter(TokenStream(*arguments, **options))


def by_asyncio(*arguments: Any, **options: Any) -> Generator[Event, None, None]:
    events = aiter(AsyncTokenStream(*arguments, **options))
    with asyncio.Runner() as runner:
        try:
            while True:
                try:
                    yield runner.run(events.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            runner.run(events.aclose())


class Following:
    """A stream that is read in a thread, at most `ahead` events before they are taken."""

    def __init__(self, events: Iterator[Event], ahead: int = 0) -> None:
        self._events = events
        self._taken: queue.Queue[Event | BaseException] = queue.Queue(ahead)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._events:
                self._taken.put(event)
        except Exception as error:  # noqa: BLE001 - passed to the test, which raises it
            self._taken.put(error)
        else:
            self._taken.put(StopIteration())

    def take(self, count: int) -> list[int]:
        """The `seq` of the next `count` events."""
        return [self._next().seq for _ in range(count)]

    def rest(self) -> list[Event]:
        """All events up to the end."""
        events = []
        while isinstance(event := self._taken.get(timeout=WATCHDOG_SECONDS), Event):
            events.append(event)
        if not isinstance(event, StopIteration):
            raise event
        return events

    def error(self) -> BaseException:
        error = self._taken.get(timeout=WATCHDOG_SECONDS)
        assert isinstance(error, BaseException)
        return error

    def _next(self) -> Event:
        event = self._taken.get(timeout=WATCHDOG_SECONDS)
        if isinstance(event, BaseException):
            raise event
        return event


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def num_log_reads(client: RedisClient) -> int:
    """How often a log has been read."""
    return int(client.info("commandstats").get("cmdstat_xrange", {"calls": 0})["calls"])


def num_subscribers(client: RedisClient, task_id: str) -> int:
    return int(client.pubsub_numsub(keys.channel(task_id))[0][1])


def wait_until_live(client: RedisClient, task_id: str, reads_before: int) -> None:
    """Wait until the log was read at the start and after the subscription: then the channel delivers."""
    wait_until(lambda: num_subscribers(client, task_id) == 1 and num_log_reads(client) >= reads_before + 2)


def append_unheard(client: RedisClient, task_id: str, seq: int) -> None:
    """Append an entry whose message on the channel is lost."""
    (entry,) = tokens(seq, 1)
    client.xadd(keys.log(task_id), {"t": entry.token, "x": entry.text}, id=f"0-{seq + 1}")
