"""docker-compose.yml and its overlay are valid, pinned, closed to the outside and complete."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from tests.conftest import free_port
from tests.live_service import wait_for
from tokenmill.serve.embedded_redis import find_redis_server
from tokenmill.settings.declarations import ApiSettings, Timing, WorkerSettings
from tokenmill.settings.setting import settings_of
from worker.batch_worker import SHUTDOWN_SECONDS

ROOT = Path(__file__).parents[2]
FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]
SERVICES = yaml.safe_load((ROOT / FILES[0]).read_text())["services"]
OVERLAY = yaml.safe_load((ROOT / FILES[1]).read_text())["services"]
TOKENMILL = ["api", "worker"]
GPU_WORKERS = [f"worker-{number}" for number in range(1, 8)]
READ = {
    name: {one.variable for one in settings_of(each).values()}
    for name, each in (("api", ApiSettings), ("worker", WorkerSettings))
}
LIBRARY_VARIABLES = {"HF_TOKEN"}
"""Read by a library, not a setting."""
SET_BY_IMAGE = {"TOKENMILL_CACHE_DIR"}
"""Where the volume is mounted."""
FIXED = {
    "REDIS_URL",
    "TOKENMILL_HOLD_UNUSABLE",
    "TOKENMILL_HOST",
    "TOKENMILL_PORT",
    "TOKENMILL_METRICS_HOST",
    "TOKENMILL_METRICS_PORT",
}
"""Addresses inside the containers, on which other lines rely, and what `restart` requires."""

each_service = pytest.mark.parametrize("name", SERVICES)


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


@pytest.mark.parametrize("file", FILES)
def test_the_file_follows_the_compose_specification(file: str) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / file],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout


def test_all_services_exist() -> None:
    assert set(SERVICES) == {"redis", "api", "worker", *GPU_WORKERS, "prometheus", "grafana"}
    # Older versions of compose refuse it.
    assert "name" not in yaml.safe_load((ROOT / FILES[0]).read_text())


@each_service
def test_images_are_pinned_or_built_here(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    else:
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])


@each_service
def test_ports_are_published_on_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@each_service
def test_services_have_health_checks_and_wait_for_them(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    for dependency in service.get("depends_on", {}).values():
        assert dependency == {"condition": "service_healthy"}


@each_service
def test_volumes_are_declared_or_read_only(name: str) -> None:
    declared = yaml.safe_load((ROOT / FILES[0]).read_text())["volumes"]
    for volume in SERVICES[name].get("volumes", []):
        source, _, mode = volume.split(":") if volume.count(":") == 2 else (*volume.split(":"), "")
        if source.startswith("."):
            assert (ROOT / source).is_dir()
            assert mode == "ro"
        else:
            assert source in declared


def test_redis_is_not_published_and_needs_a_password() -> None:
    service = SERVICES["redis"]
    assert "ports" not in service
    (variable,) = set(service["environment"])
    start = service["command"][-1]
    assert f"requirepass $${variable}" in start
    # Neither the command line nor a file of the container contains it.
    password = service["environment"][variable]
    assert password.startswith("${REDIS_PASSWORD:?")
    assert f":{password}@redis:" in SERVICES["api"]["environment"]["REDIS_URL"]


def test_redis_starts_as_written(tmp_path: Path) -> None:
    """With the command of the file and the local server program."""
    port, password = free_port(), "5ec" * 20
    (tmp_path / "redis-server").symlink_to(find_redis_server())
    command = [part.replace("$$", "$") for part in SERVICES["redis"]["command"]]
    command[-1] = command[-1].replace("redis-server -", f"redis-server - --port {port}")
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": password},
        stdout=subprocess.DEVNULL,
    )
    try:
        with redis.Redis(port=port, password=password) as client:
            wait_for(lambda: answers(client), "Redis answers")
            assert client.config_get("appendfsync")["appendfsync"] == "always"
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("x")
        assert password.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        # It replaced the shell, so it receives the signal of `docker compose stop`.
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@each_service
def test_a_service_has_no_unneeded_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["init"] is True


def test_unusable_settings_do_not_restart_forever() -> None:
    for name in (*TOKENMILL, *GPU_WORKERS):
        assert SERVICES[name]["restart"] == "unless-stopped"
        assert SERVICES[name]["environment"]["TOKENMILL_HOLD_UNUSABLE"] == "true"


def test_redis_keeps_every_accepted_task() -> None:
    command = SERVICES["redis"]["command"][-1]
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert SERVICES["redis"]["volumes"] == ["redis-data:/data"]


@pytest.mark.parametrize("name", TOKENMILL)
def test_every_setting_can_be_set_from_outside(name: str) -> None:
    environment = SERVICES[name]["environment"]
    read = READ[name] - SET_BY_IMAGE
    assert set(environment) == read | (LIBRARY_VARIABLES if name == "worker" else set())
    passed_on = {variable: text for variable, text in environment.items() if variable not in FIXED}
    assert passed_on == {variable: f"${{{variable}:-}}" for variable in passed_on}
    assert set(OVERLAY.get(name, {}).get("environment", {})) <= read


@pytest.mark.parametrize("name", [*TOKENMILL, "redis"])
def test_a_service_that_exits_is_restarted(name: str) -> None:
    """A worker that hangs ends itself, because compose does not restart an unhealthy container."""
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert "profiles" not in SERVICES[name]
    assert "TOKENMILL_STALL_SECONDS" in SERVICES["worker"]["environment"]
    # A shell or script in between would replace the exit status.
    if name in TOKENMILL:
        assert "command" not in SERVICES[name]
        assert SERVICES[name]["init"] is True


def test_a_hanging_worker_is_unhealthy_before_it_ends() -> None:
    check = SERVICES["worker"]["healthcheck"]
    assert "/readyz" in check["test"][-1]
    assert seconds(check["timeout"]) < Timing().stall_seconds


@pytest.mark.parametrize(
    ("name", "needed"),
    [("api", ApiSettings().http_grace_seconds), ("worker", Timing().grace_seconds + SHUTDOWN_SECONDS)],
)
def test_a_container_is_killed_later_than_its_process_needs(name: str, needed: float) -> None:
    """Ten times later, as the grace periods are settings."""
    assert seconds(SERVICES[name]["stop_grace_period"]) >= 10 * needed


def test_the_images_set_what_compose_leaves_to_them() -> None:
    assert re.search(r"\bTOKENMILL_CACHE_DIR=/cache\b", (ROOT / "worker/Dockerfile").read_text())
    assert SERVICES["worker"]["volumes"] == ["model-cache:/cache"]


def test_health_checks_ask_the_ports_that_are_set() -> None:
    for name, variable in (("api", "TOKENMILL_PORT"), ("worker", "TOKENMILL_METRICS_PORT")):
        service = SERVICES[name]
        assert f"127.0.0.1:{service['environment'][variable]}/" in service["healthcheck"]["test"][-1]


def test_grafana_is_read_only() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_each_worker_of_the_overlay_has_its_own_gpu() -> None:
    """With `count: 1` in several services, moby assigns GPU 0 to all of them."""
    assert set(OVERLAY) == {"worker", *GPU_WORKERS}
    for number, name in enumerate(["worker", *GPU_WORKERS]):
        (device,) = OVERLAY[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "capabilities": ["gpu"], "device_ids": [str(number)]}
        assert OVERLAY[name]["environment"] == {"TOKENMILL_DEVICE": "cuda"}


def test_further_workers_equal_the_first_and_need_a_profile() -> None:
    for number, name in enumerate(GPU_WORKERS, start=1):
        profiles = [f"{count}-gpus" for count in (2, 4, 8) if count > number]
        assert SERVICES[name] == {**SERVICES["worker"], "profiles": profiles}


def test_prometheus_scrapes_services_of_the_file() -> None:
    config: Any = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())
    hosts = {
        target.split(":")[0]
        for job in config["scrape_configs"]
        for static in job.get("static_configs", [])
        for target in static["targets"]
    } | {
        name
        for job in config["scrape_configs"]
        for dns in job.get("dns_sd_configs", [])
        for name in dns["names"]
    }
    aliases = {SERVICES[name]["networks"]["default"]["aliases"][0] for name in ("worker", *GPU_WORKERS)}
    assert aliases == {"workers"}
    assert hosts - {"localhost"} == {"api", *aliases}
