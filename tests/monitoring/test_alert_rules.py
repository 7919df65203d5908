"""Checks of the alert rules that need no Prometheus."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.exported import families, metric_names, series_names, shared_names, summed_names

PROMETHEUS = Path(__file__).parents[2] / "monitoring" / "prometheus"
GROUPS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
RULES = [pytest.param(rule, id=rule["alert"]) for group in GROUPS for rule in group["rules"]]
TESTS = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_reads_only_exported_metrics(rule: Any) -> None:
    names = metric_names(rule["expr"])
    assert names
    assert names <= series_names(families()) | {"up"}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_does_not_sum_metrics_of_the_deployment(rule: Any) -> None:
    assert not summed_names(rule["expr"]) & shared_names()


def test_a_sum_over_processes_is_detected_anywhere_in_an_expression() -> None:
    for expression in (
        "sum(tokenmill_tasks_owned) > 0",
        'max(sum by (model) (rate(tokenmill_tasks_submitted_total{model="m"}[5m])))',
        "1 - avg(tokenmill_workers / 2)",
    ):
        assert summed_names(expression) & shared_names()
    assert not summed_names("sum(max by (model) (tokenmill_tasks_owned))")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_severity_summary_and_description(rule: Any) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_cases_that_fire_and_that_do_not(rule: Any) -> None:
    cases = [
        case
        for group in TESTS["tests"]
        for case in group["alert_rule_test"]
        if case["alertname"] == rule["alert"]
    ]
    outcomes = {bool(case.get("exp_alerts")) for case in cases}
    assert outcomes == {True, False}


def test_scrape_jobs_match_the_rules_and_compose() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert {"tokenmill-api", "tokenmill-worker"} <= set(jobs)
    compose = yaml.safe_load((PROMETHEUS.parents[1] / "docker-compose.yml").read_text())["services"]
    host, port = jobs["tokenmill-api"]["static_configs"][0]["targets"][0].split(":")
    assert compose[host]["environment"]["TOKENMILL_PORT"] == port
    (worker,) = jobs["tokenmill-worker"]["dns_sd_configs"]
    (alias,) = worker["names"]
    workers = [
        service
        for service in compose.values()
        if alias in ((service.get("networks") or {}).get("default") or {}).get("aliases", ())
    ]
    assert workers
    for service in workers:
        assert service["environment"]["TOKENMILL_METRICS_PORT"] == str(worker["port"])
