"""One Redis subscription for all streams of a process, with a bounded queue for each stream.

Invariants: the hub thread never waits for a client. A client that is too slow, or may have missed a message,
is made to replay from the log, which is complete. Only the hub thread uses the connection.
"""

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import redis
import structlog

from tokenmill.process.redis_outages import OutageLog

_log = structlog.get_logger(__name__)

MAX_PENDING = 1024
"""Messages queued for one client. One more discards them all and makes the client replay from the log."""
TICK_SECONDS = 1.0
RETRY_SECONDS = 0.5
MAX_UNANSWERED = 3
"""The connection is considered dead after this many unanswered health checks, one per tick."""


class Arrived(NamedTuple):
    """What one client received. `replay`: the log must be read before `messages`."""

    replay: bool
    messages: list[bytes]


class Subscription:
    """One client's queue. Created by `PubSubHub.subscribe`."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._replay = False

    def wait(self, seconds: float) -> Arrived:
        """Return everything since the last call; wait up to `seconds` if there is nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._replay or self._messages, seconds)
            arrived = Arrived(self._replay, list(self._messages))
            self._replay = False
            self._messages.clear()
            return arrived

    def put(self, message: bytes) -> None:
        """Queue a message of the channel. A full queue is discarded: the log has its messages."""
        with self._changed:
            if len(self._messages) >= MAX_PENDING:
                self._messages.clear()
                self._replay = True
            self._messages.append(message)
            self._changed.notify()

    def must_replay(self) -> None:
        """The channel is live from now on. Earlier messages must be read from the log."""
        with self._changed:
            # The log holds the queued messages too, and is read first.
            self._messages.clear()
            self._replay = True
            self._changed.notify()


class PubSubHub:
    """Subscriptions to channels, for any number of threads. The hub thread starts with the first one.

    `connect` returns the client whose one connection the hub listens on. `publish` sends an empty message on
    a channel through another client: it wakes the hub thread, which listens on a channel of its own.
    """

    def __init__(self, connect: Callable[[], redis.Redis], publish: Callable[[str], object]) -> None:
        self._connect = connect
        self._publish = publish
        self._name = f"tokenmill:hub:{secrets.token_hex(8)}"
        self._requests: SimpleQueue[tuple[bool, Subscription]] = SimpleQueue()
        self._channels: dict[bytes, _Channel] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._outages = OutageLog(_log, "event hub")

    @property
    def is_running(self) -> bool:
        """Whether the hub thread was started."""
        return self._thread is not None

    @contextlib.contextmanager
    def subscribe(self, channel: str) -> Iterator[Subscription]:
        """Subscribe for the length of the block. `replay` is first set when Redis confirms the channel."""
        self._start()
        subscription = Subscription(channel)
        self._request(True, subscription)
        try:
            yield subscription
        finally:
            self._request(False, subscription)

    def close(self) -> None:
        """Stop the hub thread if it was started."""
        self._closing.set()
        self._wake()
        if self._thread:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
                self._thread.start()

    def _request(self, join: bool, subscription: Subscription) -> None:
        self._requests.put((join, subscription))
        self._wake()

    def _wake(self) -> None:
        # A lost wake-up delays the request by one tick.
        with contextlib.suppress(redis.RedisError):
            self._publish(self._name)

    # Called by the hub thread only.

    def _run(self) -> None:
        with self._connect() as client:
            while not self._closing.is_set():
                try:
                    with client.pubsub() as pubsub:
                        self._listen(pubsub)
                except redis.RedisError as error:
                    self._outages.failed(error)
                except Exception:  # noqa: BLE001 - it is logged
                    # Without this thread every stream would silently fall back to polling the log.
                    _log.exception("the event hub failed and restarts")
                self._closing.wait(RETRY_SECONDS)

    def _listen(self, pubsub: Any) -> None:
        """Route messages until closed. Raises Redis errors; redis-py itself mends short outages silently."""
        pubsub.subscribe(self._name, *self._channels)
        while not self._closing.is_set():
            self._handle_requests(pubsub)
            message = pubsub.get_message(timeout=TICK_SECONDS)
            if message is not None:
                self._outages.worked()
                self._route(message)
            elif pubsub.health_check_response_counter > MAX_UNANSWERED:
                raise redis.TimeoutError("the subscription's connection is dead")

    def _handle_requests(self, pubsub: Any) -> None:
        while True:
            try:
                join, subscription = self._requests.get_nowait()
            except Empty:
                return
            name = subscription.channel.encode()
            if join:
                self._join(pubsub, name, subscription)
            else:
                self._leave(pubsub, name, subscription)

    def _join(self, pubsub: Any, name: bytes, subscription: Subscription) -> None:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel()
            channel.members.append(subscription)
            pubsub.subscribe(name)
        else:
            channel.members.append(subscription)
            if channel.confirmed:
                subscription.must_replay()

    def _leave(self, pubsub: Any, name: bytes, subscription: Subscription) -> None:
        channel = self._channels[name]
        channel.members.remove(subscription)
        if not channel.members:
            del self._channels[name]
            pubsub.unsubscribe(name)

    def _route(self, message: dict[str, Any]) -> None:
        channel = self._channels.get(message["channel"])
        if channel is None:
            return
        if message["type"] == "message":
            for member in channel.members:
                member.put(message["data"])
        elif message["type"] == "subscribe":
            # The first confirmation, or one after a silent reconnection, before which messages may be lost.
            channel.confirmed = True
            for member in channel.members:
                member.must_replay()


class _Channel:
    """The subscriptions to one channel, and whether Redis has confirmed it."""

    def __init__(self) -> None:
        self.members: list[Subscription] = []
        self.confirmed = False
