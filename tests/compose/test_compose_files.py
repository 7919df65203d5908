"""docker-compose.yml and its overlay: valid, pinned, closed to the outside, and in step with the settings."""

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
from tokenmill.settings.declaration import settings_of
from tokenmill.settings.processes import ApiSettings, Timing, WorkerSettings
from worker.batch_worker import SHUTDOWN_SECONDS

ROOT = Path(__file__).parents[2]
FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]
SERVICES = yaml.safe_load((ROOT / FILES[0]).read_text())["services"]
OVERLAY = yaml.safe_load((ROOT / FILES[1]).read_text())["services"]
OURS = ["api", "worker"]
GPU_WORKERS = [f"worker-{number}" for number in range(1, 8)]
READ = {
    name: {one.variable for one in settings_of(each).values()}
    for name, each in (("api", ApiSettings), ("worker", WorkerSettings))
}
OTHERS_VARIABLES = {"HF_TOKEN"}
"""Read by a library, not by our settings."""
SET_BY_THE_IMAGE = {"TOKENMILL_CACHE_DIR"}
"""Where the volume is mounted."""
PART_OF_THE_SHAPE = {
    "REDIS_URL",
    "TOKENMILL_HOLD_UNUSABLE",
    "TOKENMILL_HOST",
    "TOKENMILL_PORT",
    "TOKENMILL_METRICS_HOST",
    "TOKENMILL_METRICS_PORT",
}
"""Addresses inside the containers, which other lines of the file rely on, and what goes with `restart`."""

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


def test_all_parts_are_there() -> None:
    assert set(SERVICES) == {"redis", "api", "worker", *GPU_WORKERS, "prometheus", "grafana"}
    # The compose of older distributions refuses it.
    assert "name" not in yaml.safe_load((ROOT / FILES[0]).read_text())


@each_service
def test_images_are_pinned_or_built_here(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    else:
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])


@each_service
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@each_service
def test_health_is_checked_and_waited_for(name: str) -> None:
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


def test_redis_is_for_the_services_alone() -> None:
    service = SERVICES["redis"]
    assert "ports" not in service
    (variable,) = set(service["environment"])
    start = service["command"][-1]
    assert f"requirepass $${variable}" in start
    # Neither the command line nor a file of the container shows it.
    password = service["environment"][variable]
    assert password.startswith("${REDIS_PASSWORD:?")
    assert f":{password}@redis:" in SERVICES["api"]["environment"]["REDIS_URL"]


def test_redis_starts_as_written(tmp_path: Path) -> None:
    """The command of the file, with the server that there is here."""
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
        # It took the place of the shell, so it hears the signal of `docker compose stop`.
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
def test_a_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["init"] is True


def test_what_cannot_be_used_does_not_restart_for_ever() -> None:
    for name in (*OURS, *GPU_WORKERS):
        assert SERVICES[name]["restart"] == "unless-stopped"
        assert SERVICES[name]["environment"]["TOKENMILL_HOLD_UNUSABLE"] == "true"


def test_redis_keeps_every_accepted_task() -> None:
    command = SERVICES["redis"]["command"][-1]
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert SERVICES["redis"]["volumes"] == ["redis-data:/data"]


@pytest.mark.parametrize("name", OURS)
def test_every_setting_can_be_set_from_outside(name: str) -> None:
    environment = SERVICES[name]["environment"]
    read = READ[name] - SET_BY_THE_IMAGE
    assert set(environment) == read | (OTHERS_VARIABLES if name == "worker" else set())
    passed_on = {
        variable: text for variable, text in environment.items() if variable not in PART_OF_THE_SHAPE
    }
    assert passed_on == {variable: f"${{{variable}:-}}" for variable in passed_on}
    assert set(OVERLAY.get(name, {}).get("environment", {})) <= read


@pytest.mark.parametrize("name", [*OURS, "redis"])
def test_what_ends_is_started_again(name: str) -> None:
    """A worker that hangs ends itself; compose starts nothing again for being unhealthy alone."""
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert "profiles" not in SERVICES[name]
    assert "TOKENMILL_STALL_SECONDS" in SERVICES["worker"]["environment"]
    # With a shell or a script between, the exit status would be that one's.
    if name in OURS:
        assert "command" not in SERVICES[name]
        assert SERVICES[name]["init"] is True


def test_a_worker_says_that_it_hangs_before_it_ends() -> None:
    check = SERVICES["worker"]["healthcheck"]
    assert "/readyz" in check["test"][-1]
    assert seconds(check["timeout"]) < Timing().stall_seconds


@pytest.mark.parametrize(
    ("name", "needed"),
    [("api", ApiSettings().http_grace_seconds), ("worker", Timing().grace_seconds + SHUTDOWN_SECONDS)],
)
def test_a_container_is_stopped_later_than_its_process_needs(name: str, needed: float) -> None:
    """Ten times later: the graces are settings, and a process that keeps them ends itself."""
    assert seconds(SERVICES[name]["stop_grace_period"]) >= 10 * needed


def test_the_images_set_what_compose_leaves_to_them() -> None:
    assert re.search(r"\bTOKENMILL_CACHE_DIR=/cache\b", (ROOT / "worker/Dockerfile").read_text())
    assert SERVICES["worker"]["volumes"] == ["model-cache:/cache"]


def test_health_checks_ask_the_ports_that_are_set() -> None:
    for name, variable in (("api", "TOKENMILL_PORT"), ("worker", "TOKENMILL_METRICS_PORT")):
        service = SERVICES[name]
        assert f"127.0.0.1:{service['environment'][variable]}/" in service["healthcheck"]["test"][-1]


def test_grafana_can_be_looked_at_and_not_changed() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_the_overlay_gives_each_worker_a_gpu_of_its_own() -> None:
    """moby takes a count for the first devices: several workers with `count: 1` are all on GPU 0."""
    assert set(OVERLAY) == {"worker", *GPU_WORKERS}
    for number, name in enumerate(["worker", *GPU_WORKERS]):
        (device,) = OVERLAY[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "capabilities": ["gpu"], "device_ids": [str(number)]}
        assert OVERLAY[name]["environment"] == {"TOKENMILL_DEVICE": "cuda"}


def test_further_workers_are_as_the_first_and_started_when_asked_for() -> None:
    for number, name in enumerate(GPU_WORKERS, start=1):
        profiles = [f"{count}-gpus" for count in (2, 4, 8) if count > number]
        assert SERVICES[name] == {**SERVICES["worker"], "profiles": profiles}


def test_every_service_that_prometheus_scrapes_is_one_of_ours() -> None:
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
