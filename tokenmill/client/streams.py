"""Follow a task's events in Redis: `for event in TokenStream(url, task_id)`, or `async for` with
`AsyncTokenStream`.

Both perform the steps of `stream_steps`; here is only the I/O.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import NoBackoff

from tokenmill.client.stream_steps import (
    UNAVAILABLE,
    Deliver,
    ReadLog,
    Retry,
    Step,
    StreamSteps,
    Subscribe,
    UnknownTask,
    WaitForMessage,
)
from tokenmill.protocol import redis_url
from tokenmill.protocol.messages import Event

__all__ = ["AsyncTokenStream", "TokenStream", "UnknownTask"]

SILENCE_SECONDS = 15.0
"""The log is read after this time without an event."""
SOCKET_SECONDS = 5.0

_ADDRESS = frozenset({"host", "port", "path", "db", "username", "password", "credential_provider"})


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The events of one task after the one with `seq` `after`; -1 means all. Ends after the last event.

    `source`: a Redis URL, or a client whose address is used. Iterating raises `UnknownTask`, and a
    `redis.ConnectionError` if Redis cannot be reached at the beginning. Later it reconnects for as long as it
    takes and logs one warning for each outage.
    """

    source: "str | redis.Redis" = field(repr=False)
    task_id: str
    after: int = -1
    _: KW_ONLY
    silence_seconds: float = SILENCE_SECONDS

    def __iter__(self) -> Generator[Event, None, None]:
        steps = StreamSteps(self.task_id, self.after, self.silence_seconds)
        with ExitStack() as stack:
            client = _connect(self.source, redis)
            for opened in _opened(self.source, client):
                stack.callback(opened.close)
            connection = _Connection(client)
            stack.callback(connection.close)
            step = steps.first()
            while step:
                try:
                    result = connection.perform(step)
                except UNAVAILABLE as error:
                    step = steps.failed(error)
                    continue
                if isinstance(step, Deliver):
                    yield from step.events
                step = steps.done(result)


@dataclass(frozen=True, eq=False)
class AsyncTokenStream:
    """`TokenStream` for asyncio: `async for event in AsyncTokenStream(url, task_id)`.

    `source`: a Redis URL, or an asyncio client whose address is used. To leave the loop early, wrap the
    iterator in `contextlib.aclosing`, as for every asynchronous generator.
    """

    source: "str | redis.asyncio.Redis" = field(repr=False)
    task_id: str
    after: int = -1
    _: KW_ONLY
    silence_seconds: float = SILENCE_SECONDS

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        steps = StreamSteps(self.task_id, self.after, self.silence_seconds)
        async with AsyncExitStack() as stack:
            client = _connect(self.source, redis.asyncio)
            for opened in _opened(self.source, client):
                stack.push_async_callback(opened.aclose)
            connection = _AsyncConnection(client)
            stack.push_async_callback(connection.close)
            step = steps.first()
            while step:
                try:
                    result = await connection.perform(step)
                except UNAVAILABLE as error:
                    step = steps.failed(error)
                    continue
                if isinstance(step, Deliver):
                    for event in step.events:
                        yield event
                step = steps.done(result)


class _Connection:
    """Performs steps with a `redis.Redis`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pubsub: Any = None

    def perform(self, step: Step) -> Any:
        match step:
            case ReadLog():
                with self._client.pipeline(transaction=True) as pipeline:
                    step.queue_commands(pipeline)
                    return pipeline.execute()
            case Subscribe():
                self.close()
                self._pubsub = self._client.pubsub()
                self._pubsub.subscribe(step.channel)
            case WaitForMessage():
                return self._pubsub.get_message(timeout=step.seconds)
            case Retry():
                self.close()
                time.sleep(step.seconds)
        return None

    def close(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()


class _AsyncConnection:
    """Performs steps with a `redis.asyncio.Redis`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pubsub: Any = None

    async def perform(self, step: Step) -> Any:
        match step:
            case ReadLog():
                async with self._client.pipeline(transaction=True) as pipeline:
                    step.queue_commands(pipeline)
                    return await pipeline.execute()
            case Subscribe():
                await self.close()
                self._pubsub = self._client.pubsub()
                await self._pubsub.subscribe(step.channel)
            case WaitForMessage():
                return await self._pubsub.get_message(timeout=step.seconds)
            case Retry():
                await self.close()
                await asyncio.sleep(step.seconds)
        return None

    async def close(self) -> None:
        if self._pubsub is not None:
            await self._pubsub.aclose()


def _opened(source: Any, client: Any) -> list[Any]:
    """The clients that `_connect` has opened, including those of the Sentinels in a URL."""
    manager = getattr(client.connection_pool, "sentinel_manager", None) if isinstance(source, str) else None
    return [client, *(manager.sentinels if manager else ())]


def _connect(source: Any, library: Any) -> Any:
    """A client of its own. `library`: `redis` or `redis.asyncio`.

    The socket timeout applies to replies; each wait for a message has its own. The library must not retry:
    that would hide gaps and outages.
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
    settings = pool.connection_kwargs.items()
    address = {name: value for name, value in settings if name in _ADDRESS or name.startswith("ssl_")}
    if sentinels := getattr(pool, "sentinel_manager", None):
        return sentinels.master_for(pool.service_name, socket_keepalive=True, **address, **options)
    if "path" not in address:
        # TCP only: the library's class for Unix sockets raises TypeError for it.
        options["socket_keepalive"] = True
    own_pool = library.ConnectionPool(connection_class=pool.connection_class, **address, **options)
    return library.Redis.from_pool(own_pool)
