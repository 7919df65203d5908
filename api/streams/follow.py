"""One task's events from a given place on, as they come: replay, then live.

Law: every event once, in order, none left out, whatever happens to Redis on the way; ends after the
terminal one. Knows the hub and the log, not how events are shown.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator

import redis

from api.streams.hub import Arrived, Hub
from tokenmill.protocol import keys
from tokenmill.protocol.assembler import Assembler
from tokenmill.protocol.messages import Event, FinishedEvent, decode
from tokenmill.protocol.store.task_store import TaskStore

logger = logging.getLogger(__name__)

LOG_PAGE = 200
"""Events of the log that are read, and held, at a time for one reader."""
TICK_SECONDS = 1.0
"""A client that went away is noticed after so long at most."""
SILENCE_SECONDS = 15.0
"""After so long without an event the log is read again: no message tells of a lost one."""


class Follower:
    """Follows tasks for any number of threads."""

    def __init__(self, hub: Hub, store: TaskStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub = hub
        self._store = store
        self._clock = clock

    def batches(
        self, task_id: str, after: int, *, stop: Callable[[], bool], seconds: float = math.inf
    ) -> Iterator[list[Event]]:
        """What came, in batches; an empty one at each quiet tick.

        Ends after the terminal event, when the task is no longer known, when `stop()` says so or after
        `seconds`.
        """
        deadline = self._clock() + seconds
        with self._hub.subscribe(keys.channel(task_id)) as subscription:
            join = _Join(self._store, task_id, after, self._clock)
            while not stop() and (left := deadline - self._clock()) > 0:
                batch = join.take(subscription.wait(0.0 if join.is_behind else min(TICK_SECONDS, left)))
                yield batch
                if join.ended:
                    return

    def wait_for_end(self, task_id: str, after: int, seconds: float, *, stop: Callable[[], bool]) -> None:
        """Returns when the task has ended, when `stop()` says so or after `seconds`."""
        for _ in self.batches(task_id, after, stop=stop, seconds=seconds):
            pass


class _Join:
    """Joins the log and the live messages of one task for one reader."""

    def __init__(self, store: TaskStore, task_id: str, after: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._task_id = task_id
        self._assembler = Assembler(after)
        self._clock = clock
        self._heard_at = clock()
        self._over = False
        self.is_behind = False
        """The log holds more than the last page that was read of it."""

    @property
    def ended(self) -> bool:
        return self._assembler.ended or (self._over and not self.is_behind)

    def take(self, arrived: Arrived) -> list[Event]:
        """The events that are new, in order. While Redis is away there are none; then all come."""
        silent = self._clock() - self._heard_at >= SILENCE_SECONDS
        self._assembler.must_read_log |= arrived.replay or silent
        batch: list[Event] = []
        try:
            self._join(arrived.messages, batch)
            if not batch and (arrived.replay or silent):
                self._ask_whether_it_is_over()
        except redis.RedisError as error:
            logger.debug("task %s: the log cannot be read, trying again: %s", self._task_id, error)
            self._assembler.must_read_log = True
            # Not at once again.
            self.is_behind = False
        if batch or silent:
            self._heard_at = self._clock()
        return batch

    def _join(self, messages: list[bytes], batch: list[Event]) -> None:
        self._read_log(batch)
        for message in messages:
            event = decode(message)
            batch.extend(self._assembler.live(event))
            # A message may show that those before it are missing. Page after page, one a turn.
            if not self.is_behind:
                self._read_log(batch)
            # Also for a reader who asked to begin behind the end, and to whom the end is not given.
            self._over |= isinstance(event, FinishedEvent) and event.done

    def _ask_whether_it_is_over(self) -> None:
        """Deleted by other tools, expired, or ended before the place from which this reader goes on."""
        snapshot = self._store.inspect(self._task_id)
        self._over = snapshot is None or snapshot.finished_at is not None

    def _read_log(self, batch: list[Event]) -> None:
        if self._assembler.must_read_log:
            events = self._store.read_log(self._task_id, self._assembler.last, LOG_PAGE)
            batch.extend(self._assembler.replayed(events))
            self.is_behind = self._assembler.must_read_log = len(events) == LOG_PAGE
