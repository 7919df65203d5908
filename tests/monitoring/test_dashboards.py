"""Checks of the dashboards that need no Grafana: layout, queries, texts."""

import itertools
import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.exported import families, metric_names, series_names, shared_names, summed_names

GRAFANA = Path(__file__).parents[2] / "monitoring" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}
"""Grafana's variables with values for the checks."""


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def panels_of(dashboard: Any) -> list[Any]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def with_values(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


PANELS = [pytest.param(panel, id=panel["title"]) for path in FILES for panel in panels_of(load(path))]


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ids_are_unique_and_panels_do_not_overlap(path: Path) -> None:
    dashboard = load(path)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert dashboard["uid"] == path.stem
    positions = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(one["x"] >= 0 and one["x"] + one["w"] <= 24 for one in positions)
    assert not [pair for pair in itertools.combinations(positions, 2) if overlap(*pair)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_data_source_is_a_variable(path: Path) -> None:
    dashboard = load(path)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert metric_names(variables["model"]["definition"].removeprefix("label_values(").split(",")[0]) <= (
        series_names(families())
    )


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_title_description_and_unit(panel: Any) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_does_not_sum_metrics_of_the_deployment(panel: Any) -> None:
    """With two API processes it would show two ready workers for one."""
    for target in panel["targets"]:
        assert not summed_names(with_values(target["expr"])) & shared_names()


@pytest.mark.parametrize("panel", PANELS)
def test_a_panels_queries_read_only_exported_metrics(panel: Any) -> None:
    refs = [target["refId"] for target in panel["targets"]]
    assert len(refs) == len(set(refs))
    for target in panel["targets"]:
        expression = target["expr"]
        assert target["datasource"] == panel["datasource"]
        assert "$" not in with_values(expression), "an unknown variable"
        names = metric_names(with_values(expression))
        assert names, "a query without metrics"
        assert names <= series_names(families())
        # rate() over a fixed window is wrong when the scrape interval or the zoom changes.
        assert "[" not in expression.replace("[$__rate_interval]", "")


@pytest.mark.parametrize("panel", PANELS)
def test_a_panels_description_names_its_metrics(panel: Any) -> None:
    """A pattern such as `tokenmill_tasks_*_total` names several."""
    patterns = re.findall(r"tokenmill_[a-z0-9_*]+", panel["description"])
    for target in panel["targets"]:
        families = {
            re.sub("_(bucket|sum|count)$", "", name) for name in metric_names(with_values(target["expr"]))
        }
        assert any(fnmatch(family, pattern) for family in families for pattern in patterns)


def test_every_family_is_on_a_dashboard() -> None:
    shown = {
        name
        for path in FILES
        for panel in panels_of(load(path))
        for target in panel["targets"]
        for name in metric_names(with_values(target["expr"]))
    }
    unshown = {family.name for family in families() if not series_names([family]) & shown}
    assert unshown == {"tokenmill_prompt_tokens"}, "it is the sum of the prompt lengths, which are shown"


def test_provisioning_refers_to_the_dashboards_and_to_prometheus() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/tokenmill.yml").read_text())["providers"]
    compose = yaml.safe_load((GRAFANA.parents[1] / "docker-compose.yml").read_text())
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert providers[0]["options"]["path"] in mounts
    assert "/etc/grafana/provisioning" in mounts
