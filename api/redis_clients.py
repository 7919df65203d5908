"""Redis clients with explicit timeouts: a command succeeds or fails within seconds, and is never sent twice.

By default redis-py retries a command ten times, which could block an HTTP thread for a minute. After a
failover no connection to the demoted server is kept.
"""

import threading
from collections.abc import Callable
from typing import Any

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol import redis_url

_log = structlog.get_logger(__name__)

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
# Errors without a class in redis-py: their text begins with the code.
_UNAVAILABLE_CODES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY", "TOOLATE")

_REASONS: tuple[tuple[Callable[[redis.RedisError], bool], str], ...] = (
    (lambda error: isinstance(error, redis.exceptions.OutOfMemoryError), "its memory is full"),
    (lambda error: str(error).startswith("MISCONF"), "it cannot write to its disk, which may be full"),
    (lambda error: isinstance(error, redis.exceptions.ReadOnlyError), "it is a read-only replica"),
    (lambda error: str(error).startswith("NOREPLICAS"), "too few of its replicas are reachable"),
    (lambda error: isinstance(error, redis.exceptions.BusyLoadingError), "it is loading its data"),
)


class _Client(redis.Redis):
    """Drops its connections when the server turns out to be a replica: after a failover the name may resolve
    to another server. Logs each outage once for all callers.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outages = OutageLog(_log, "API")

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
    """Serializes discovery: the library reorders its list of sentinels without a lock, so that two threads at
    once can lose one of them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call] # redis-py's
        self._lock = threading.Lock()

    def discover_master(self, service_name: str) -> Any:
        with self._lock:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]


class _Library:
    """The names of redis-py that `redis_url.client` uses, with the classes above."""

    Redis = _Client
    Sentinel = _Sentinels
    ConnectionPool = redis.ConnectionPool
    Connection = redis.Connection
    SSLConnection = redis.SSLConnection
    UnixDomainSocketConnection = redis.UnixDomainSocketConnection


def connect(url: str, max_threads: int = 128) -> redis.Redis:
    """A client for commands of up to `max_threads` threads at once.

    A thread holds at most one connection at a time. redis-py's pool does not wait for a connection: it
    raises beyond `max_threads`, and beyond 100 by default.
    """
    options = {"max_connections": max_threads, **_options(ANSWER_SECONDS)}
    client: redis.Redis = redis_url.client(_Library, url, **options)
    return client


def connect_subscriber(url: str) -> redis.Redis:
    """A client for one subscription, with health checks while no message arrives."""
    options = {"health_check_interval": HEALTH_CHECK_SECONDS, **_options(ANSWER_SECONDS)}
    client: redis.Redis = redis_url.client(redis, url, **options)
    return client


def is_unavailable(error: Exception) -> bool:
    """Whether Redis cannot serve at the moment (down, loading, full, a replica). Other errors are bugs."""
    if not isinstance(error, redis.RedisError):
        return False
    return isinstance(error, _UNAVAILABLE) or str(error).startswith(_UNAVAILABLE_CODES)


def why_unavailable(error: redis.RedisError) -> str:
    """The reason in words, for an error that `is_unavailable`."""
    return next((text for holds, text in _REASONS if holds(error)), "it does not answer")


def _options(answer_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
