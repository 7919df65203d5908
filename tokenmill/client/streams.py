"""Follow a task's messages: `for event in TokenStream(url, task_id)`, or `async for` with its twin.

Law: every event once, in order, none left out, whatever happens to the connection; ends after the last one.
The channel is for speed only, the log is the truth: it is read after every subscription, on a gap and after
a silence. Knows no API and no worker.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, closing, contextmanager
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import NoBackoff

from tokenmill.protocol import keys, log, redis_url
from tokenmill.protocol.assembler import Assembler
from tokenmill.protocol.messages import Event, decode

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 15.0
TICK_SECONDS = 1.0
"""A wait for a message takes no longer, so that health checks are sent while nothing comes."""
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
SOCKET_SECONDS = 5.0

_ADDRESS = frozenset({"host", "port", "path", "db", "username", "password", "credential_provider"})
_AWAY = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.MasterDownError)


class UnknownTask(Exception):
    """No task has this id: it never was, or its retention is over."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"no task {task_id!r}: it was never submitted here, or it has expired")
        self.task_id = task_id


class TokenStream:
    """The events of one task, from the one after `after` on; -1 means all. Ends after the terminal one.

    `source`: a Redis URL, or a client of which only the address is taken. Iterating raises `UnknownTask`,
    and a `redis.ConnectionError` only where Redis is not reached at the beginning: later it reconnects, for
    as long as it takes, and logs one warning for each outage.
    """

    def __init__(
        self,
        source: "str | redis.Redis",
        task_id: str,
        after: int = -1,
        *,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._source = source
        self._task_id = task_id
        self._after = after
        self._silence_seconds = silence_seconds

    def __iter__(self) -> Iterator[Event]:
        assembler, delay = Assembler(self._after), FIRST_RETRY_SECONDS
        with ExitStack() as stack:
            client = _connect(self._source, redis)
            for ours in _to_close(self._source, client):
                stack.callback(ours.close)
            with _at_the_beginning():
                yield from self._look(client, assembler)
            while not assembler.ended:
                try:
                    for event in self._listen(client, assembler):
                        delay = FIRST_RETRY_SECONDS
                        yield event
                except redis.AuthenticationError:
                    raise
                except _AWAY as error:
                    _warn_once(delay, self._task_id, assembler, error)
                    time.sleep(delay)
                    delay = min(2 * delay, LAST_RETRY_SECONDS)

    def _listen(self, client: Any, assembler: Assembler) -> Iterator[Event]:
        """Until the end, or until the channel kept something back that stood in the log."""
        with closing(client.pubsub()) as pubsub:
            pubsub.subscribe(keys.channel(self._task_id))
            heard_at = time.monotonic()
            while not assembler.ended:
                message = pubsub.get_message(timeout=min(TICK_SECONDS, self._silence_seconds))
                silent = time.monotonic() - heard_at >= self._silence_seconds
                yield from _heard(assembler, message, silent=silent)
                if assembler.must_read_log:
                    last = assembler.last
                    yield from self._look(client, assembler)
                    if silent and assembler.last > last:
                        return
                if message or silent:
                    heard_at = time.monotonic()

    def _look(self, client: Any, assembler: Assembler) -> Iterator[Event]:
        """What the log has after the last event. Each page is given away before the next may fail."""
        assembler.must_read_log = True
        while assembler.must_read_log:
            with client.pipeline(transaction=True) as pipeline:
                _ask(pipeline, self._task_id, assembler.last)
                page = _answered(self._task_id, assembler, pipeline.execute())
            yield from page


class AsyncTokenStream:
    """`TokenStream` for asyncio: `async for event in AsyncTokenStream(url, task_id)`.

    `source`: a Redis URL, or an asyncio client of which only the address is taken. Who leaves the loop early
    wraps the iterator in `contextlib.aclosing`, as with every asynchronous generator.
    """

    def __init__(
        self,
        source: "str | redis.asyncio.Redis",
        task_id: str,
        after: int = -1,
        *,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._source = source
        self._task_id = task_id
        self._after = after
        self._silence_seconds = silence_seconds

    async def __aiter__(self) -> AsyncIterator[Event]:
        assembler, delay = Assembler(self._after), FIRST_RETRY_SECONDS
        async with AsyncExitStack() as stack:
            client = _connect(self._source, redis.asyncio)
            for ours in _to_close(self._source, client):
                stack.push_async_callback(ours.aclose)
            with _at_the_beginning():
                async for event in self._look(client, assembler):
                    yield event
            while not assembler.ended:
                try:
                    async for event in self._listen(client, assembler):
                        delay = FIRST_RETRY_SECONDS
                        yield event
                except redis.AuthenticationError:
                    raise
                except _AWAY as error:
                    _warn_once(delay, self._task_id, assembler, error)
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, LAST_RETRY_SECONDS)

    async def _listen(self, client: Any, assembler: Assembler) -> AsyncIterator[Event]:
        """Until the end, or until the channel kept something back that stood in the log."""
        async with aclosing(client.pubsub()) as pubsub:
            await pubsub.subscribe(keys.channel(self._task_id))
            heard_at = time.monotonic()
            while not assembler.ended:
                message = await pubsub.get_message(timeout=min(TICK_SECONDS, self._silence_seconds))
                silent = time.monotonic() - heard_at >= self._silence_seconds
                for event in _heard(assembler, message, silent=silent):
                    yield event
                if assembler.must_read_log:
                    last = assembler.last
                    async for event in self._look(client, assembler):
                        yield event
                    if silent and assembler.last > last:
                        return
                if message or silent:
                    heard_at = time.monotonic()

    async def _look(self, client: Any, assembler: Assembler) -> AsyncIterator[Event]:
        """What the log has after the last event. Each page is given away before the next may fail."""
        assembler.must_read_log = True
        while assembler.must_read_log:
            async with client.pipeline(transaction=True) as pipeline:
                _ask(pipeline, self._task_id, assembler.last)
                page = _answered(self._task_id, assembler, await pipeline.execute())
            for event in page:
                yield event


def _warn_once(delay: float, task_id: str, assembler: Assembler, error: Exception) -> None:
    """At the first failure of an outage, which is the one after which the shortest time is waited."""
    if delay == FIRST_RETRY_SECONDS:
        logger.warning(
            "task %s: waiting for Redis, to go on after message %d: %s", task_id, assembler.last, error
        )


@contextmanager
def _at_the_beginning() -> Iterator[None]:
    """Whatever keeps Redis from answering there is a `redis.ConnectionError`, as documented."""
    try:
        yield
    except redis.ConnectionError:
        raise
    except _AWAY as error:
        raise redis.ConnectionError(f"Redis does not answer: {error}") from error


def _heard(assembler: Assembler, message: dict[str, Any] | None, *, silent: bool) -> list[Event]:
    """What a message of the subscription says, or that there was none for long."""
    if message and message["type"] == "message":
        return assembler.live(decode(message["data"]))
    # The confirmation. A later one means that the library has reconnected and something may be missing.
    assembler.must_read_log |= silent or message is not None
    return []


def _ask(pipeline: Any, task_id: str, last: int) -> None:
    """One transaction: a task that has ended has its last message in the log of the same moment."""
    pipeline.xrange(keys.log(task_id), min=log.first_id(last), count=log.PAGE)
    pipeline.exists(keys.log(task_id), keys.run(task_id))
    pipeline.hexists(keys.run(task_id), "terminal")


def _answered(task_id: str, assembler: Assembler, replies: list[Any]) -> list[Event]:
    rows, known, ended = replies
    if not known:
        raise UnknownTask(task_id)
    new = assembler.replayed(log.events(task_id, rows))
    # A whole page: there may be more of it.
    assembler.must_read_log = len(rows) == log.PAGE
    # Also where nothing is left after the place from which this reader wanted to go on.
    assembler.ended |= bool(ended) and not assembler.must_read_log
    return new


def _to_close(source: Any, client: Any) -> list[Any]:
    """What `_connect` has opened: the client and, where a URL named them, those of its Sentinels."""
    manager = getattr(client.connection_pool, "sentinel_manager", None) if isinstance(source, str) else None
    return [client, *(manager.sentinels if manager else ())]


def _connect(source: Any, library: Any) -> Any:
    """A client of our own, `library` being `redis` or `redis.asyncio`, with every option that matters here.

    The socket's timeout is for answers; how long a subscription waits is said with each wait. No retries
    within the library: they would hide a gap, and for how long Redis is away.
    """
    options = {
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": SOCKET_SECONDS,
        "health_check_interval": SILENCE_SECONDS,
        "retry": library.retry.Retry(NoBackoff(), 0),
        "decode_responses": False,
    }
    if isinstance(source, str):
        return redis_url.client(library, source, socket_keepalive=True, **options)
    pool = source.connection_pool
    given = pool.connection_kwargs.items()
    address = {name: value for name, value in given if name in _ADDRESS or name.startswith("ssl_")}
    if sentinels := getattr(pool, "sentinel_manager", None):
        return sentinels.master_for(pool.service_name, socket_keepalive=True, **address, **options)
    if "path" not in address:
        # TCP only: the library's class for Unix sockets raises TypeError for it.
        options["socket_keepalive"] = True
    own_pool = library.ConnectionPool(connection_class=pool.connection_class, **address, **options)
    return library.Redis.from_pool(own_pool)
