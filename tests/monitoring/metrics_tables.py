"""Writes the tables of docs/metrics.md: `python -m tests.monitoring.metrics_tables`.

Type, labels and description come from the code. The page's text and the order of its tables are kept.
"""

import re
from pathlib import Path

from prometheus_client import Metric

from tests.monitoring.exported import families

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(tokenmill_\w+)` \|.*\|$", re.MULTILINE)
LABELS_OF_LATE_SERIES = {
    "tokenmill_http_requests_total": "method, route, status",
    "tokenmill_http_request_duration_seconds": "method, route",
}
"""Labels of families whose series appear with their first event."""


def exported_rows() -> dict[str, str]:
    """Metric -> row of its table."""
    return {_name(family): _row(family) for family in families()}


def current_page() -> str:
    """The page with each row as the code has it. A row of an unknown metric is removed."""
    rows = exported_rows()
    page = PAGE.read_text("utf-8")
    return re.sub(r"\n{3,}", "\n\n", ROW.sub(lambda row: rows.get(row[1], ""), page))


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _row(family: Metric) -> str:
    name = _name(family)
    labels = ", ".join(sorted({label for sample in family.samples for label in sample.labels} - {"le"}))
    labels = LABELS_OF_LATE_SERIES.get(name, labels)
    columns = [f"`{name}`", family.type, labels, family.documentation]
    return "| " + " | ".join(columns).replace("|  |", "| |") + " |"


if __name__ == "__main__":
    PAGE.write_text(current_page(), "utf-8")
