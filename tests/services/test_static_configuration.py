"""Prometheus's and Docker's own checks of the shipped configuration."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from monitoring.http import expose
from tests.monitoring.exported import api_registry, worker_registry

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "monitoring" / "prometheus"

Program = Callable[[str], str]


def check(*command: str | Path, stdin: bytes = b"") -> None:
    ran = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout.decode()


def test_the_scrape_configuration(program: Program) -> None:
    check(program("promtool"), "check", "config", PROMETHEUS / "prometheus.yml")


def test_the_alert_rules(program: Program) -> None:
    check(program("promtool"), "check", "rules", PROMETHEUS / "alerts.yml")


def test_the_alert_rules_fire_when_they_should(program: Program) -> None:
    check(program("promtool"), "test", "rules", PROMETHEUS / "alerts_test.yml")


@pytest.mark.parametrize("registry", [api_registry(), worker_registry()], ids=["api", "worker"])
def test_the_exposition_before_any_event(program: Program, registry: object) -> None:
    body, _ = expose(registry)  # type: ignore[arg-type]  # a CollectorRegistry, as parametrize gives it
    check(program("promtool"), "check", "metrics", stdin=body)


@pytest.mark.parametrize("profile", ["none", "2-gpus", "8-gpus"])
@pytest.mark.parametrize("overlays", [[], ["docker-compose.gpu.yml"]], ids=["cpu", "gpu"])
def test_compose_reads_the_files(
    program: Program, overlays: list[str], profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "5ec2e7")
    files = [argument for name in ["docker-compose.yml", *overlays] for argument in ("-f", name)]
    check(program("docker-compose"), *files, "--profile", profile, "config", "--quiet")


def test_compose_needs_a_password(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REDIS_PASSWORD", raising=False)
    (tmp_path / "empty").touch()
    ran = subprocess.run(
        [program("docker-compose"), "--env-file", str(tmp_path / "empty"), "config", "--quiet"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode != 0
    assert b"set it in .env" in ran.stdout
