"""A real Prometheus scrapes the live service. Every panel and every alert finds its metrics."""

import json
import math
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import free_port
from tests.live_service import LiveService, http, wait_for
from tests.monitoring.exported import families, metric_names, series_names
from tests.services.traffic import NUM_CANCELLED, NUM_COMPLETED, NUM_FAILED, NUM_TASKS, run_traffic

pytestmark = pytest.mark.services

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['refId']}")
    for path in DASHBOARDS
    for panel in json.loads(path.read_text())["panels"]
    for target in panel.get("targets", [])
]
ALERTS = [
    pytest.param(rule["expr"], id=rule["alert"])
    for group in yaml.safe_load((MONITORING / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
# Far longer than the traffic, so that every rate covers all of it.
WINDOW = "1h"
SCRAPE_SECONDS = 1


class Prometheus:
    """Prometheus's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        reply = http("GET", f"{self.url}{path}?{urllib.parse.urlencode(parameters)}")
        assert reply.status == 200, reply.body
        return reply.json["data"]

    def query(self, expression: str) -> list[float]:
        """The finite values of an instant query."""
        result = self.get("/api/v1/query", query=expression)["result"]
        values = [float(series["value"][1]) for series in result]
        return [value for value in values if math.isfinite(value)]

    def value(self, expression: str) -> float | None:
        values = self.query(expression)
        assert len(values) <= 1, values
        return values[0] if values else None


def configuration(live: LiveService) -> dict[str, Any]:
    """The shipped configuration with the addresses of this service."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "prometheus" / name) for name in config["rule_files"]]
    addresses = {"tokenmill-api": live.api_url, "tokenmill-worker": live.worker.url}
    config["scrape_configs"] = [
        {"job_name": job["job_name"], "static_configs": [{"targets": [url.removeprefix("http://")]}]}
        for job in config["scrape_configs"]
        if (url := addresses.get(job["job_name"]))
    ]
    assert len(config["scrape_configs"]) == len(addresses)
    return config


@pytest.fixture(scope="module")
def prometheus(
    live: LiveService, program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that scraped the service before, during and after its traffic."""
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration(live)))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"http://{address}")
    try:
        wait_for(lambda: is_up(server, process, directory / "log"), "Prometheus is ready")
        wait_for(lambda: server.value("sum(up)") == 2, "both targets are scraped")
        run_traffic(live)
        wait_for(lambda: has_all(server), "the last end is scraped")
        yield server
    finally:
        process.kill()
        process.wait()


def is_up(server: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return http("GET", f"{server.url}/-/ready").status == 200
    except OSError:
        return False


def has_all(server: Prometheus) -> bool:
    """Whether all ends were scraped twice, so that new series have a rate."""
    window = f"[{2 * SCRAPE_SECONDS}s:{SCRAPE_SECONDS}s]"
    return server.value(f"min_over_time(sum(tokenmill_tasks_finished_total){window})") == NUM_TASKS


def has_value(server: Prometheus, query: str, value: float) -> bool:
    return server.value(query) == value


def is_zero(server: Prometheus, query: str) -> bool:
    return has_value(server, query, 0)


@pytest.mark.parametrize("expression", QUERIES)
def test_a_panel_shows_data(prometheus: Prometheus, expression: str) -> None:
    query = expression.replace("$__rate_interval", WINDOW).replace("$model", ".*")
    assert wait_for(lambda: prometheus.query(query), f"data for {query}", 60)


@pytest.mark.parametrize("expression", ALERTS)
def test_an_alert_finds_every_metric_that_it_reads(prometheus: Prometheus, expression: str) -> None:
    prometheus.query(expression)
    for name in metric_names(expression):
        assert prometheus.query(f"count({name})"), name


def test_prometheus_evaluates_the_rules_and_none_fires_on_a_healthy_service(prometheus: Prometheus) -> None:
    def evaluated() -> list[Any]:
        groups = prometheus.get("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in rules) else rules

    rules = wait_for(evaluated, "every rule was evaluated")
    assert len(rules) == len(ALERTS)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_every_exported_metric_arrives(prometheus: Prometheus) -> None:
    arrived = set(prometheus.get("/api/v1/label/__name__/values"))
    assert series_names(families()) <= arrived


def test_the_numbers_are_those_of_the_traffic(prometheus: Prometheus) -> None:
    """vllm#31503: the sum over the finish reasons is what was submitted, aborted and failed ones included."""
    ended = {
        reason: prometheus.value(f'sum(tokenmill_tasks_finished_total{{reason="{reason}"}})')
        for reason in ("stop", "length", "cancelled", "timeout", "error")
    }
    assert ended == {
        "stop": 0,
        "length": NUM_COMPLETED,
        "cancelled": NUM_CANCELLED,
        "timeout": 0,
        "error": NUM_FAILED,
    }
    assert prometheus.value("sum(tokenmill_tasks_submitted_total)") == NUM_TASKS
    assert (
        prometheus.value("sum(tokenmill_time_to_first_token_seconds_count)") == NUM_COMPLETED + NUM_CANCELLED
    )


def test_every_claimed_task_is_counted_at_its_end(prometheus: Prometheus) -> None:
    """vllm#31503, vllm#55634: aborted requests were missing in the finished counter.

    A cancel counts the same whether the worker receives it or its write is rejected. The failed task was
    refused before it reached the engine.
    """
    assert prometheus.value("sum(tokenmill_tasks_claimed_total)") == NUM_TASKS
    for reason, number in (("length", NUM_COMPLETED), ("cancelled", NUM_CANCELLED)):
        ended = f'sum(tokenmill_requests_finished_total{{reason="{reason}"}})'
        wait_for(partial(has_value, prometheus, ended, number), f"{ended} is {number}", 60)
    assert prometheus.value("sum(tokenmill_requests_finished_total)") == NUM_COMPLETED + NUM_CANCELLED
    assert prometheus.value("sum(tokenmill_tasks_lost_total)") == 0


def test_gauges_of_an_idle_service_are_zero(prometheus: Prometheus) -> None:
    """vllm#22545: gauges kept their last values after all requests had ended."""
    for gauge in (
        "tokenmill_requests",
        "tokenmill_requests_waiting_by_reason",
        "tokenmill_queue_tasks",
        "tokenmill_tasks_owned",
        "tokenmill_kv_cache_usage_ratio",
        "tokenmill_http_streams_open",
        "tokenmill_publish_backlog_messages",
    ):
        wait_for(partial(is_zero, prometheus, f"sum({gauge})"), f"{gauge} is 0", 60)


def test_the_live_exposition_passes_promtool(
    prometheus: Prometheus, live: LiveService, program: Callable[[str], str]
) -> None:
    for url in (live.api_url, live.worker.url):
        body = http("GET", f"{url}/metrics").body
        checked = subprocess.run([program("promtool"), "check", "metrics"], input=body, capture_output=True)
        assert checked.returncode == 0, checked.stderr.decode()


def test_clients_cannot_create_series(prometheus: Prometheus, live: LiveService) -> None:
    """litellm#35666, llm-d-batch-gateway#202: paths, ids and model names of clients became label values."""

    def num_series() -> int:
        body = http("GET", f"{live.api_url}/metrics").body
        return sum(not line.startswith(b"#") for line in body.splitlines())

    def knock(number: int) -> None:
        live.call("GET", f"/v1/made-up/{number}")
        live.call("GET", f"/v1/tasks/{number:032x}")
        live.call(f"FOO{number}", "/v1/tasks")
        live.call("POST", "/v1/tasks", {"prompt": "x", "model": f"model-{number}"})

    knock(0)
    before = num_series()
    for number in range(1, 30):
        knock(number)
    assert num_series() == before
