"""Connections to Redis with explicit limits: a call fails within seconds or works, and is never sent twice.

The library's defaults retry ten times in silence, which would hold an HTTP thread for a minute. After a
failover no connection stays with a server that only reads.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol import redis_url

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
HEALTH_CHECK_SECONDS = 15

_UNAVAILABLE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,
)
# Errors that the library knows no class for; it leaves their code in the text.
_UNAVAILABLE_CODES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY", "TOOLATE")

_REASONS: tuple[tuple[Callable[[redis.RedisError], bool], str], ...] = (
    (lambda error: isinstance(error, redis.exceptions.OutOfMemoryError), "its memory is full"),
    (lambda error: str(error).startswith("MISCONF"), "it cannot write to its disk, which may be full"),
    (lambda error: isinstance(error, redis.exceptions.ReadOnlyError), "it is a replica that only reads"),
    (lambda error: str(error).startswith("NOREPLICAS"), "too few of its replicas are in reach"),
    (lambda error: isinstance(error, redis.exceptions.BusyLoadingError), "it loads its data"),
)


class _Client(redis.Redis):
    """A name may lead to another server by now, while a connection lives on to the one that was demoted.

    An outage is logged here, once, for all that call.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outages = OutageLog(logger, "API")

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            reply = super().execute_command(*args, **options)  # type: ignore[no-untyped-call] # redis-py's
        except redis.RedisError as error:
            if is_unavailable(error):
                self._outages.failed(error)
            if isinstance(error, redis.exceptions.ReadOnlyError):
                self.connection_pool.disconnect(inuse_connections=False)
            raise
        self._outages.worked()
        return reply


class _Sentinels(redis.Sentinel):
    """The library moves the one that answered to the front: of two threads at once, one is lost for good."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call] # redis-py's
        self._turn = threading.Lock()

    def discover_master(self, service_name: str) -> Any:
        with self._turn:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]


class _Library:
    """redis-py as this room uses it."""

    Redis = _Client
    Sentinel = _Sentinels
    ConnectionPool = redis.ConnectionPool
    Connection = redis.Connection
    SSLConnection = redis.SSLConnection
    UnixDomainSocketConnection = redis.UnixDomainSocketConnection


def connect(url: str, max_threads: int = 128) -> redis.Redis:
    """The client for commands of at most `max_threads` threads at a time.

    Each of them holds one connection while it calls. The library's own limit is 100 connections, beyond which
    it raises as if Redis were away.
    """
    options = {"max_connections": max_threads, **_options(ANSWER_SECONDS)}
    client: redis.Redis = redis_url.client(_Library, url, **options)
    return client


def connect_subscriber(url: str) -> redis.Redis:
    """The client of one subscription: reads as long as nothing comes, and asks now and then if it lives."""
    options = {"health_check_interval": HEALTH_CHECK_SECONDS, **_options(ANSWER_SECONDS)}
    client: redis.Redis = redis_url.client(redis, url, **options)
    return client


def is_unavailable(error: redis.RedisError) -> bool:
    """Whether Redis cannot serve just now (away, loading, full, a replica), rather than a fault of ours."""
    return isinstance(error, _UNAVAILABLE) or str(error).startswith(_UNAVAILABLE_CODES)


def why_unavailable(error: redis.RedisError) -> str:
    """The reason for people, of an error that `is_unavailable`."""
    return next((text for holds, text in _REASONS if holds(error)), "it does not answer")


def _options(answer_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
