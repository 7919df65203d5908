"""docker-compose.yml and its overlay: valid, pinned, closed to the outside, and in step with the settings."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]
SERVICES = yaml.safe_load((ROOT / FILES[0]).read_text())["services"]
OVERLAY = yaml.safe_load((ROOT / FILES[1]).read_text())["services"]
OURS = ["api", "worker"]
OTHERS_VARIABLES = {"HF_TOKEN"}
"""Read by a library, not by our settings."""

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
def test_variables_are_those_that_the_settings_read(name: str) -> None:
    variables = set(SERVICES[name]["environment"]) | set(OVERLAY.get(name, {}).get("environment", {}))
    read = set(re.findall(r'"([A-Z][A-Z_]+)"', (ROOT / name / "settings.py").read_text()))
    shared = set(yaml.safe_load((ROOT / FILES[0]).read_text())["x-shared-environment"])
    assert variables - OTHERS_VARIABLES <= read
    assert shared <= variables


@pytest.mark.parametrize(
    ("name", "grace"), [("api", "TOKENMILL_HTTP_GRACE_SECONDS"), ("worker", "TOKENMILL_GRACE_SECONDS")]
)
def test_a_container_is_stopped_later_than_its_process_needs(name: str, grace: str) -> None:
    service = SERVICES[name]
    assert seconds(service["stop_grace_period"]) > int(service["environment"][grace])


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
