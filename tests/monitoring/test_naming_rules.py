"""Every metric follows Prometheus' naming rules and is documented."""

import re

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from monitoring.http import expose
from tests.monitoring.exported import MODEL, api_registry, families, worker_registry
from tests.monitoring.metrics_tables import PAGE, ROW, current_page, exported_rows

LABELS = {
    "model", "priority", "reason", "stage", "kind", "state", "op", "route", "method", "status", "outcome",
    "duty",
}  # fmt: skip
ABBREVIATED_OR_SCALED = re.compile(
    r"_(s|ms|us|sec|secs|msec|milliseconds|minutes|kb|mb|bytes_total_mb|percent|pct)(_|$)"
)

each_family = pytest.mark.parametrize("family", families(), ids=lambda family: family.name)


@each_family
def test_names_and_help(family: Metric) -> None:
    assert re.fullmatch(r"tokenmill_[a-z][a-z0-9_]*", family.name), "prefix, lower case, no colon"
    assert family.type in {"counter", "gauge", "histogram"}
    assert family.documentation.endswith("."), "help is a sentence"
    assert not ABBREVIATED_OR_SCALED.search(family.name), "base units without abbreviations"
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), (
        "reserved for suffixes of the type"
    )
    if {"age", "wait", "latency", "duration", "load", "time"} & set(family.name.split("_")):
        assert family.name.endswith("_seconds")


@each_family
def test_labels_are_from_the_short_list(family: Metric) -> None:
    for sample in family.samples:
        assert set(sample.labels) - {"le"} <= LABELS
        assert sample.labels.get("model", MODEL) == MODEL


def test_each_name_has_one_family() -> None:
    names = [family.name for family in families()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("registry", [api_registry(), worker_registry()], ids=["api", "worker"])
def test_the_exposition_can_be_read_back(registry: object) -> None:
    body, _ = expose(registry)  # type: ignore[arg-type]  # a CollectorRegistry, as parametrize gives it
    read = {family.name for family in text_string_to_metric_families(body.decode())}
    assert len(read) > 5


def test_the_documentation_is_current() -> None:
    """Run `python -m tests.monitoring.metrics_tables` after a change, and add a row for a new metric."""
    page = PAGE.read_text("utf-8")
    assert page == current_page()
    assert {row[1] for row in ROW.finditer(page)} == set(exported_rows())
