"""Connections to Redis with explicit limits: a call fails within seconds or works, and is never sent twice.

The library's defaults retry ten times in silence, which would hold an HTTP thread for a minute.
"""

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
MAX_CONNECTIONS = 64
HEALTH_CHECK_SECONDS = 15

_UNAVAILABLE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,
)
# Errors that the library knows no class for; it leaves their code in the text.
_UNAVAILABLE_CODES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY")


def connect(url: str) -> redis.Redis:
    """The client for commands. More callers than connections wait for one instead of failing."""
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=MAX_CONNECTIONS, timeout=ANSWER_SECONDS, **_options(ANSWER_SECONDS)
    )
    return redis.Redis.from_pool(pool)


def connect_subscriber(url: str) -> redis.Redis:
    """The client of one subscription: reads as long as nothing comes, and asks now and then if it lives."""
    return redis.Redis.from_url(url, health_check_interval=HEALTH_CHECK_SECONDS, **_options(ANSWER_SECONDS))


def is_unavailable(error: redis.RedisError) -> bool:
    """Whether Redis cannot serve just now (away, loading, full, a replica), rather than a fault of ours."""
    return isinstance(error, _UNAVAILABLE) or str(error).startswith(_UNAVAILABLE_CODES)


def _options(answer_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
