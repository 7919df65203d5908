"""Clients of Redis, with every option spelt out: the library's defaults change and hide what happens.

Law: no call waits longer than the timeouts here, and none is tried again behind the caller's back; who gets
an error decides what it means. Each thread has a client of its own.
"""

from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.protocol import redis_url

SOCKET_SECONDS = 2.0

Connect = Callable[[str], Any]
"""Makes a client for the thread of that name."""


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
        # Finds a dead link that lies idle: a subscriber pings, a caller checks before it writes.
        health_check_interval=15,
        max_connections=4,
        client_name=name,
        decode_responses=False,
    )
    return client
