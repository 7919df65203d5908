"""One subscription to Redis for all streams of a process, fanned out through a bounded queue for each.

Law: the hub thread never waits for a client. Who does not keep up, or may have missed something, is told to
replay from the log, which is the truth; the hub itself reads no message. Only the hub thread touches the
connection. Knows neither tasks nor HTTP.
"""

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import redis

from tokenmill.process.redis_outages import OutageLog

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Messages that wait for one client before it is sent to the log instead."""
TICK_SECONDS = 1.0
RETRY_SECONDS = 0.5
MAX_UNANSWERED = 3
"""Health checks without an answer, one a tick, after which the connection is given up."""


class Arrived(NamedTuple):
    """What came for one client: `replay` says that the log must be read before `messages`."""

    replay: bool
    messages: list[bytes]


class Subscription:
    """One client's end. Made by `Hub.subscribe`."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._replay = False

    def wait(self, seconds: float) -> Arrived:
        """All that came since the last call; waits up to `seconds` for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._replay or self._messages, seconds)
            arrived = Arrived(self._replay, list(self._messages))
            self._replay = False
            self._messages.clear()
            return arrived

    def put(self, message: bytes) -> None:
        """A message of the channel. One too many drops all that wait: they stand in the log."""
        with self._changed:
            if len(self._messages) >= MAX_PENDING:
                self._messages.clear()
                self._replay = True
            self._messages.append(message)
            self._changed.notify()

    def must_replay(self) -> None:
        """From here on the channel is live; what was before must be read from the log."""
        with self._changed:
            # What waits is in the log too, and the log is read first.
            self._messages.clear()
            self._replay = True
            self._changed.notify()


class Hub:
    """Subscriptions to channels, for any number of threads. The thread starts with the first of them.

    `connect` gives the client whose one connection the hub listens on. `wake` publishes on a channel, by
    another client: the hub hears its own name and looks at what was asked of it.
    """

    def __init__(self, connect: Callable[[], redis.Redis], wake: Callable[[str], object]) -> None:
        self._connect = connect
        self._publish = wake
        self._name = f"tokenmill:hub:{secrets.token_hex(8)}"
        self._asked: SimpleQueue[tuple[bool, Subscription]] = SimpleQueue()
        self._listeners: dict[bytes, _Channel] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._outages = OutageLog(logger, "event hub")

    @contextlib.contextmanager
    def subscribe(self, channel: str) -> Iterator[Subscription]:
        """A live subscription. Its first `replay` comes once Redis has confirmed the channel."""
        self._start()
        subscription = Subscription(channel)
        self._ask(True, subscription)
        try:
            yield subscription
        finally:
            self._ask(False, subscription)

    def close(self) -> None:
        """Stop the thread, if one was started."""
        self._closing.set()
        self._wake()
        if self._thread:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
                self._thread.start()

    def _ask(self, join: bool, subscription: Subscription) -> None:
        self._asked.put((join, subscription))
        self._wake()

    def _wake(self) -> None:
        # A lost wake-up costs a tick, no more.
        with contextlib.suppress(redis.RedisError):
            self._publish(self._name)

    # The hub thread from here on.

    def _run(self) -> None:
        with self._connect() as client:
            while not self._closing.is_set():
                try:
                    with client.pubsub() as pubsub:
                        self._listen(pubsub)
                except redis.RedisError as error:
                    self._outages.failed(error)
                except Exception:
                    # Without this thread every stream would limp along on the log, and nobody would know.
                    logger.exception("the event hub failed and starts anew")
                self._closing.wait(RETRY_SECONDS)

    def _listen(self, pubsub: Any) -> None:
        """Until closed or cut off for longer than the library's own, silent reconnection can mend."""
        pubsub.subscribe(self._name, *self._listeners)
        while not self._closing.is_set():
            self._take_requests(pubsub)
            message = pubsub.get_message(timeout=TICK_SECONDS)
            if message is not None:
                self._outages.worked()
                self._route(message)
            elif pubsub.health_check_response_counter > MAX_UNANSWERED:
                raise redis.TimeoutError("the subscription's connection is dead")

    def _take_requests(self, pubsub: Any) -> None:
        while True:
            try:
                join, subscription = self._asked.get_nowait()
            except Empty:
                return
            name = subscription.channel.encode()
            if join:
                self._join(pubsub, name, subscription)
            else:
                self._leave(pubsub, name, subscription)

    def _join(self, pubsub: Any, name: bytes, subscription: Subscription) -> None:
        channel = self._listeners.get(name)
        if channel is None:
            channel = self._listeners[name] = _Channel()
            channel.members.append(subscription)
            pubsub.subscribe(name)
        else:
            channel.members.append(subscription)
            if channel.confirmed:
                subscription.must_replay()

    def _leave(self, pubsub: Any, name: bytes, subscription: Subscription) -> None:
        channel = self._listeners[name]
        channel.members.remove(subscription)
        if not channel.members:
            del self._listeners[name]
            pubsub.unsubscribe(name)

    def _route(self, message: dict[str, Any]) -> None:
        channel = self._listeners.get(message["channel"])
        if channel is None:
            return
        if message["type"] == "message":
            for member in channel.members:
                member.put(message["data"])
        elif message["type"] == "subscribe":
            # The first one, or the sign of a silent reconnection with a hole before it.
            channel.confirmed = True
            for member in channel.members:
                member.must_replay()


class _Channel:
    """Who listens to one channel, and whether Redis has said that it is live."""

    def __init__(self) -> None:
        self.members: list[Subscription] = []
        self.confirmed = False
