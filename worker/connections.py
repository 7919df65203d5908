"""Redis clients. Every option is explicit, since the library's defaults change between versions.

Invariants: no call waits longer than the timeouts here, and the library retries none; the caller decides what
an error means. Each thread has its own client.
"""

from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.protocol import redis_url

SOCKET_SECONDS = 2.0

Connect = Callable[[str], Any]
"""Creates the client of the thread of that name."""


def connect(url: str, name: str) -> "redis.Redis":
    """A client that connects at its first call. `name` shows in `CLIENT LIST`. Raises `BadRedisUrl`."""
    client: redis.Redis = redis_url.client(
        redis,
        url,
        socket_timeout=SOCKET_SECONDS,
        socket_connect_timeout=SOCKET_SECONDS,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        # Detects a dead idle connection: a subscriber pings, a caller checks before it writes.
        health_check_interval=15,
        max_connections=4,
        client_name=name,
        decode_responses=False,
    )
    return client
