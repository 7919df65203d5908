"""Follows the steps of workers: one thread and one Redis connection for all clients of a process.

Invariants: the thread never waits for a client. A client that falls behind the buffer of a feed skips steps.
A worker is marked as watched only while a client follows it.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import redis
import structlog

from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol import keys, steps

_log = structlog.get_logger(__name__)

PAGE = 200
"""Entries read at a time."""
BLOCK_MILLISECONDS = 250
RENEW_SECONDS = 3.0
RETRY_SECONDS = 0.5


class EntryId(NamedTuple):
    """The id of an entry: order and text of `<milliseconds>-<number>`."""

    milliseconds: int
    number: int

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> "EntryId":
        """Raises ValueError."""
        milliseconds, number = text.split("-")
        return cls(int(milliseconds), int(number))


BEGINNING = EntryId(0, 0)


class StepEntry(NamedTuple):
    """One step of a worker as it is stored, see `tokenmill/protocol/steps.py`."""

    id: EntryId
    data: bytes


class StepFeed:
    """The newest steps of one worker. Created by `StepFeeds.follow`."""

    def __init__(self) -> None:
        self.num_members = 0
        self._changed = threading.Condition()
        self._entries: deque[StepEntry] = deque(maxlen=steps.MAX_ENTRIES)
        self._is_loaded = False

    @property
    def last_id(self) -> EntryId:
        with self._changed:
            return self._entries[-1].id if self._entries else BEGINNING

    def start_of(self, last: int, seconds: float) -> EntryId | None:
        """The id before the last `last` steps. None: the stored steps are not read after `seconds`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_loaded, seconds):
                return None
            if last >= len(self._entries):
                return BEGINNING
            return self._entries[-1 - last].id

    def wait(self, after: EntryId, seconds: float) -> list[StepEntry]:
        """The steps after `after`, oldest first, at most a page. Waits up to `seconds` for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries and self._entries[-1].id > after, seconds)
            # A live client is a few entries behind: search from the end.
            number = 0
            for entry in reversed(self._entries):
                if entry.id <= after:
                    break
                number += 1
            size = len(self._entries)
            return [self._entries[place] for place in range(size - number, min(size, size - number + PAGE))]

    def put(self, entries: list[StepEntry], *, is_loaded: bool) -> None:
        with self._changed:
            self._entries.extend(entries)
            self._is_loaded = self._is_loaded or is_loaded
            self._changed.notify_all()


class StepFeeds:
    """Feeds of any number of workers. The thread starts with the first one.

    `connect` returns the client whose one connection the thread uses. `clock`: monotonic seconds.
    """

    def __init__(
        self, connect: Callable[[], redis.Redis], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._changed = threading.Condition()
        self._feeds: dict[str, StepFeed] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._renewed: dict[str, float] = {}
        self._outages = OutageLog(_log, "step feeds")

    @contextlib.contextmanager
    def follow(self, name: str) -> Iterator[StepFeed]:
        """The feed of a worker, shared with the other clients that follow it."""
        with self._changed:
            feed = self._feeds.setdefault(name, StepFeed())
            feed.num_members += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="step feeds", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            yield feed
        finally:
            with self._changed:
                feed.num_members -= 1
                if not feed.num_members:
                    del self._feeds[name]

    def close(self) -> None:
        """Stop the thread if it was started."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread:
            thread.join()

    # Called by the thread only.

    def _run(self) -> None:
        with self._connect() as client:
            while (feeds := self._wait_for_feeds()) is not None:
                try:
                    self._renew(client, feeds)
                    self._read(client, feeds)
                    self._outages.worked()
                except redis.RedisError as error:
                    self._outages.failed(error)
                    client.connection_pool.disconnect()
                    self._pause()
                except Exception:  # noqa: BLE001 - it is logged
                    _log.exception("the step feeds failed and restart")
                    self._pause()

    def _wait_for_feeds(self) -> dict[str, StepFeed] | None:
        """A copy of the feeds, once there is one. None: closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._feeds or self._is_closing)
            return None if self._is_closing else dict(self._feeds)

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, RETRY_SECONDS)

    def _renew(self, client: Any, feeds: dict[str, StepFeed]) -> None:
        now = self._clock()
        self._renewed = {name: at for name, at in self._renewed.items() if name in feeds}
        for name in feeds:
            if now - self._renewed.get(name, float("-inf")) >= RENEW_SECONDS:
                client.set(keys.steps_watched(name), b"1", ex=steps.WATCHED_SECONDS)
                self._renewed[name] = now

    def _read(self, client: Any, feeds: dict[str, StepFeed]) -> None:
        """Wait a moment for entries. A feed without a full page has been read to its end."""
        by_key = {keys.steps(name).encode(): feed for name, feed in feeds.items()}
        after = {key: str(feed.last_id) for key, feed in by_key.items()}
        reply = client.xread(after, count=PAGE, block=BLOCK_MILLISECONDS)
        found = dict(reply or ())
        for key, feed in by_key.items():
            rows = found.get(key, [])
            entries = [
                StepEntry(EntryId.parse(entry_id.decode()), fields[steps.FIELD]) for entry_id, fields in rows
            ]
            feed.put(entries, is_loaded=len(rows) < PAGE)
