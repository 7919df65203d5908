"""Reads the events of one task from a given `seq` on: first from its log, then live.

Invariants: each event is yielded once and in order, whatever happens to Redis meanwhile. The stream ends
after the terminal event.
"""

import math
import time
from collections.abc import Callable, Iterator

import redis
import structlog

from api.redis_clients import is_unavailable
from api.streams.pubsub_hub import Arrived, PubSubHub
from tokenmill.protocol import keys
from tokenmill.protocol.assembler import Assembler
from tokenmill.protocol.messages import Event, FinishedEvent, decode
from tokenmill.protocol.store.task_store import TaskStore

_log = structlog.get_logger(__name__)

LOG_PAGE = 200
"""Events that are read from the log at a time. One reader holds no more than this."""
TICK_SECONDS = 1.0
"""Longest wait between two calls of `stop`."""
SILENCE_SECONDS = 15.0
"""After this time without an event the log is read again: nothing announces a lost message."""


class TaskEventReader:
    """Reads events for any number of threads. `clock`: monotonic seconds."""

    def __init__(self, hub: PubSubHub, store: TaskStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub = hub
        self._store = store
        self._clock = clock

    def batches(
        self, task_id: str, after: int, *, stop: Callable[[], bool], seconds: float = math.inf
    ) -> Iterator[list[Event]]:
        """Yield the events after `after` in batches, and an empty batch for each tick without events.

        Ends after the terminal event, when the task no longer exists, when `stop()` is true, or after
        `seconds`. Raises the client's error for a log that cannot be read, but none of an outage.
        """
        deadline = self._clock() + seconds
        with self._hub.subscribe(keys.channel(task_id)) as subscription:
            merge = _LogAndLive(self._store, task_id, after, self._clock)
            while not stop() and (left := deadline - self._clock()) > 0:
                batch = merge.new_events(
                    subscription.wait(0.0 if merge.log_has_more else min(TICK_SECONDS, left))
                )
                yield batch
                if merge.ended:
                    return

    def wait_for_end(self, task_id: str, after: int, seconds: float, *, stop: Callable[[], bool]) -> None:
        """Return when the task has ended, when `stop()` is true, or after `seconds`."""
        for _ in self.batches(task_id, after, stop=stop, seconds=seconds):
            pass


class _LogAndLive:
    """Merges the log and the live messages of one task for one reader."""

    def __init__(self, store: TaskStore, task_id: str, after: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._task_id = task_id
        self._assembler = Assembler(after)
        self._clock = clock
        self._last_event_at = clock()
        self._finished = False
        self.log_has_more = False
        """The log holds more than the page that was read last."""

    @property
    def ended(self) -> bool:
        return self._assembler.ended or (self._finished and not self.log_has_more)

    def new_events(self, arrived: Arrived) -> list[Event]:
        """The new events in order. Empty while Redis is unavailable; later calls return what was missed.

        Raises the client's error if the log cannot be read, as one that was overwritten.
        """
        is_silent = self._clock() - self._last_event_at >= SILENCE_SECONDS
        self._assembler.must_read_log |= arrived.replay or is_silent
        batch: list[Event] = []
        try:
            self._merge(arrived.messages, batch)
            if not batch and (arrived.replay or is_silent):
                self._check_finished()
                # It may have ended after the log was read.
                self._assembler.must_read_log |= self._finished
                self._read_log(batch)
        except redis.RedisError as error:
            if not is_unavailable(error):
                raise
            _log.debug("cannot read a log, will retry", task=self._task_id, error=str(error))
            self._assembler.must_read_log = True
            # Retry at the next tick, not at once.
            self.log_has_more = False
        if batch or is_silent:
            self._last_event_at = self._clock()
        return batch

    def _merge(self, messages: list[bytes], batch: list[Event]) -> None:
        self._read_log(batch)
        for message in messages:
            event = decode(message)
            batch.extend(self._assembler.live(event))
            # A gap before this message is filled from the log, one page for each call.
            if not self.log_has_more:
                self._read_log(batch)
            # Also ends a reader that starts after the terminal event, which the assembler then skips.
            self._finished |= isinstance(event, FinishedEvent) and event.done

    def _check_finished(self) -> None:
        """Detect a task that was deleted, has expired, or ended before the reader's first `seq`."""
        snapshot = self._store.inspect(self._task_id)
        self._finished = snapshot is None or snapshot.finished_at is not None

    def _read_log(self, batch: list[Event]) -> None:
        if self._assembler.must_read_log:
            events = self._store.read_log(self._task_id, self._assembler.last, LOG_PAGE)
            batch.extend(self._assembler.replayed(events))
            self.log_has_more = self._assembler.must_read_log = len(events) == LOG_PAGE
