"""How to follow the events of a task, as steps for a driver to perform. No I/O here.

Invariant: every event is delivered once and in order, and none is missing, whatever happens to the
connection; the stream ends after the last event. The channel only makes delivery fast, and the log is
authoritative: it is read after each subscription, on a gap and after a silence. An event of a type that a
newer version has added is skipped; another version of the protocol is a `ProtocolError`.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from tokenmill.protocol import keys, log
from tokenmill.protocol.assembler import Assembler
from tokenmill.protocol.messages import AnyEvent, Event, UnknownEvent, decode_any

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
"""The longest wait for a message; redis-py sends health checks in between."""
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0

UNAVAILABLE = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.MasterDownError)
"""Errors after which the driver calls `StreamSteps.failed`."""


class UnknownTask(Exception):
    """No task has this id: it was never submitted, or its retention has passed."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"no task {task_id!r}: it was never submitted here, or it has expired")
        self.task_id = task_id


@dataclass(frozen=True, slots=True)
class Deliver:
    """Yield `events` to the consumer before the next step."""

    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Execute `queue_commands` in one transaction. Result: its replies."""

    task_id: str
    after: int

    def queue_commands(self, pipeline: Any) -> None:
        """The log after `after`, whether the task exists, and whether it has ended at the same moment."""
        pipeline.xrange(keys.log(self.task_id), min=log.first_id(self.after), count=log.PAGE)
        pipeline.exists(keys.log(self.task_id), keys.run(self.task_id))
        pipeline.hexists(keys.run(self.task_id), "terminal")


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to `channel` on a new connection, and close the previous one."""

    channel: str


@dataclass(frozen=True, slots=True)
class WaitForMessage:
    """Wait for `seconds` at most. Result: redis-py's message, or None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Close the subscription and sleep for `seconds`."""

    seconds: float


Step = Deliver | ReadLog | Subscribe | WaitForMessage | Retry


class StreamSteps:
    """The steps for one task, from the event after `after` on. `clock`: monotonic seconds.

    A driver performs `first()`, then what `done(result)` or `failed(error)` returns, until that is None.
    `failed` raises the error if following must end: a `redis.ConnectionError` before the first events, or
    wrong credentials. `done` raises `UnknownTask`.
    """

    def __init__(
        self,
        task_id: str,
        after: int,
        silence_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task_id = task_id
        self._assembler = Assembler(after)
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._steps = self._follow()

    def first(self) -> Step | None:
        return next(self._steps, None)

    def done(self, result: Any = None) -> Step | None:
        """The step after one that returned `result`."""
        try:
            return self._steps.send(result)
        except StopIteration:
            return None

    def failed(self, error: Exception) -> Step | None:
        """The step after one that raised `error`, one of `UNAVAILABLE`."""
        try:
            return self._steps.throw(error)
        except StopIteration:
            return None

    def _follow(self) -> Generator[Step, Any, None]:
        yield from self._read_log_at_start()
        delay = FIRST_RETRY_SECONDS
        while not self._assembler.ended:
            before = self._assembler.last
            try:
                yield from self._listen()
            except redis.AuthenticationError:
                raise
            except UNAVAILABLE as error:
                if self._assembler.last > before:
                    delay = FIRST_RETRY_SECONDS
                if delay == FIRST_RETRY_SECONDS:
                    self._warn(error)
                yield Retry(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)
            else:
                delay = FIRST_RETRY_SECONDS

    def _read_log_at_start(self) -> Generator[Step, Any, None]:
        """Raises every error as a `redis.ConnectionError`, as documented."""
        try:
            yield from self._read_log()
        except redis.ConnectionError:
            raise
        except UNAVAILABLE as error:
            raise redis.ConnectionError(f"Redis does not answer: {error}") from error

    def _listen(self) -> Generator[Step, Any, None]:
        """Until the end, or until the log has events that the channel failed to deliver."""
        yield Subscribe(keys.channel(self._task_id))
        heard_at = self._clock()
        while not self._assembler.ended:
            message = yield WaitForMessage(min(TICK_SECONDS, self._silence_seconds))
            silent = self._clock() - heard_at >= self._silence_seconds
            yield from _deliver(self._received(message, silent=silent))
            if self._assembler.must_read_log:
                last = self._assembler.last
                yield from self._read_log()
                if silent and self._assembler.last > last:
                    return
            if message or silent:
                heard_at = self._clock()

    def _received(self, message: dict[str, Any] | None, *, silent: bool) -> list[AnyEvent]:
        if message and message["type"] == "message":
            return self._assembler.live(decode_any(message["data"]))
        # Another message confirms a subscription. redis-py may have reconnected, so events may be missing.
        self._assembler.must_read_log |= silent or message is not None
        return []

    def _read_log(self) -> Generator[Step, Any, None]:
        """Deliver the log after the last event, page by page."""
        assembler = self._assembler
        assembler.must_read_log = True
        while assembler.must_read_log:
            rows, exists, ended = yield ReadLog(self._task_id, assembler.last)
            if not exists:
                raise UnknownTask(self._task_id)
            events = assembler.replayed(log.to_any_events(self._task_id, rows))
            # After a full page there may be more.
            assembler.must_read_log = len(rows) == log.PAGE
            # The end may be before the position from which this stream started.
            assembler.ended |= bool(ended) and not assembler.must_read_log
            yield from _deliver(events)

    def _warn(self, error: Exception) -> None:
        """Once in an outage."""
        last = self._assembler.last
        logger.warning(
            "task %s: waiting for Redis to continue after event %d: %s", self._task_id, last, error
        )


def _deliver(events: Sequence[AnyEvent]) -> Iterator[Deliver]:
    """A step for the events of types that this version knows, if there are any."""
    if known := [event for event in events if not isinstance(event, UnknownEvent)]:
        yield Deliver(known)
