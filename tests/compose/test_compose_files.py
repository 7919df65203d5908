"""docker-compose.yml and its overlay: valid, pinned, closed to the outside, and in step with the settings."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.settings import ApiSettings
from tests.settings_read import variables_of
from worker.batch_worker import SHUTDOWN_SECONDS
from worker.settings import Timing, WorkerSettings

ROOT = Path(__file__).parents[2]
FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]
SERVICES = yaml.safe_load((ROOT / FILES[0]).read_text())["services"]
OVERLAY = yaml.safe_load((ROOT / FILES[1]).read_text())["services"]
OURS = ["api", "worker"]
READ = {"api": variables_of(ApiSettings.from_env), "worker": variables_of(WorkerSettings.from_env)}
OTHERS_VARIABLES = {"HF_TOKEN"}
"""Read by a library, not by our settings."""
SET_BY_THE_IMAGE = {"TOKENMILL_CACHE_DIR"}
"""Where the volume is mounted."""
PART_OF_THE_SHAPE = {
    "REDIS_URL",
    "TOKENMILL_HOST",
    "TOKENMILL_PORT",
    "TOKENMILL_METRICS_HOST",
    "TOKENMILL_METRICS_PORT",
}
"""Addresses inside the containers, which other lines of the file rely on."""

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
    assert set(SERVICES) == {"redis", "api", "worker", "prometheus", "grafana"}
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


def test_redis_keeps_every_accepted_task() -> None:
    command = SERVICES["redis"]["command"]
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


def test_the_overlay_reserves_a_gpu_for_the_worker_alone() -> None:
    assert set(OVERLAY) == {"worker"}
    (device,) = OVERLAY["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


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
    assert hosts - {"localhost"} == set(OURS)
