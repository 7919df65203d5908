"""A Redis that may lose accepted tasks is reported: a log line, a metric, readiness."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from api.background.redis_checks import PERIOD_SECONDS, RETRY_SECONDS, RedisChecks
from api.redis_clients import connect
from monitoring.redis_state import FAULTS, RedisStateMetrics
from tests.conftest import free_port
from tokenmill.protocol.store import server_state
from tokenmill.serve.embedded_redis import find_redis_server


@pytest.fixture
def registry() -> Any:
    return CollectorRegistry()


def present(registry: CollectorRegistry) -> Any:
    values = {name: registry.get_sample_value("tokenmill_redis_unsafe", {"reason": name}) for name in FAULTS}
    return {name for name, value in values.items() if value}


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random"])
def test_a_policy_that_evicts(
    redis_url: str,
    redis_client: redis.Redis,
    registry: CollectorRegistry,
    policy: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks = RedisChecks(connect(redis_url), RedisStateMetrics(registry))
    assert checks.check() == PERIOD_SECONDS
    assert (checks.warnings, present(registry)) == ([], set())
    redis_client.config_set("maxmemory-policy", policy)
    try:
        for _ in range(3):
            checks.check()
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    assert present(registry) == {"evicts"}
    assert policy in checks.warnings[0]
    assert len([one for one in caplog.records if policy in one.message]) == 1, "one line"
    checks.check()
    assert (checks.warnings, present(registry)) == ([], set())
    assert "resolved" in caplog.text


def test_a_server_without_an_append_only_file(
    redis_url: str, redis_client: redis.Redis, registry: CollectorRegistry
) -> None:
    checks = RedisChecks(connect(redis_url), RedisStateMetrics(registry))
    redis_client.config_set("appendonly", "no")
    try:
        checks.check()
    finally:
        redis_client.config_set("appendonly", "yes")
    assert present(registry) == {"not_persistent"}


def test_an_outage_keeps_the_known_faults_and_shortens_the_interval(registry: CollectorRegistry) -> None:
    checks = RedisChecks(connect("redis://127.0.0.1:1/0"), RedisStateMetrics(registry))
    assert checks.check() == RETRY_SECONDS
    assert checks.warnings == []


class TestManaged:
    """Managed servers have no CONFIG or forbid it; some hide parts of INFO."""

    @pytest.fixture
    def managed(self, tmp_path: Path) -> Iterator[Any]:
        port = free_port()
        process = subprocess.Popen(
            [find_redis_server(), "--port", str(port), "--dir", str(tmp_path), "--save", ""],
            stdout=subprocess.DEVNULL,
        )
        admin = redis.Redis(port=port)
        while True:
            try:
                admin.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None
        yield admin, f"redis://app:secret@127.0.0.1:{port}/0"
        process.kill()
        process.wait()

    def test_config_is_not_needed(self, managed: Any, registry: CollectorRegistry) -> None:
        admin, url = managed
        admin.config_set("maxmemory-policy", "volatile-lru")
        admin.acl_setuser("app", enabled=True, passwords="+secret", commands=["+@all", "-config"], keys="*")
        RedisChecks(connect(url), RedisStateMetrics(registry)).check()
        assert present(registry) == {"evicts", "not_persistent"}

    def test_without_info_and_config(self, managed: Any, registry: CollectorRegistry) -> None:
        admin, url = managed
        admin.acl_setuser(
            "app", enabled=True, passwords="+secret", commands=["+@all", "-config", "-info"], keys="*"
        )
        checks = RedisChecks(connect(url), RedisStateMetrics(registry))
        assert checks.check() == PERIOD_SECONDS
        assert present(registry) == {"unknown"}


class Answers:
    """A server with fixed answers."""

    def __init__(self, memory: Any = None, persistence: Any = None, config: Any = None) -> None:
        self.sections = {"memory": memory or {}, "persistence": persistence or {}}
        self.config = config or {}

    def info(self, section: Any) -> Any:
        return self.sections[section]

    def config_get(self, pattern: Any) -> Any:
        return self.config

    def setrange(self, name: str, offset: int, value: str) -> Any:
        raise AssertionError("a check writes nothing")


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (
            Answers({"maxmemory_policy": "noeviction"}, {"aof_enabled": 1, "aof_last_write_status": "ok"}),
            set(),
        ),
        (Answers(config={b"maxmemory-policy": b"allkeys-lfu"}), {"evicts"}),
        (Answers(config={"maxmemory-policy": "noeviction"}), set()),
        (Answers(), {"unknown"}),
        (
            Answers({"maxmemory_policy": "noeviction"}, {"aof_enabled": 1, "aof_last_write_status": "err"}),
            {"write_failed"},
        ),
    ],
)
def test_faults_are_found_in_the_answers(server: Answers, expected: set[str]) -> None:
    assert set(server_state.faults(server, lambda _: False)) == expected


def test_a_probe_changes_nothing(redis_client: redis.Redis) -> None:
    server_state.probe_write(redis_client)
    assert redis_client.dbsize() == 0
