"""The figures of a load as tables of text, for a terminal and for a page."""

from collections.abc import Mapping
from typing import Any

Table = list[list[str]]
"""Rows of cells; the first row is the heading."""


def figure_tables(head: Mapping[str, str], figures: Mapping[str, Any]) -> list[Table]:
    """The figures as tables of text: the run, the latencies, and the errors if there are any."""
    tables = [[["run", ""], *([name, value] for name, value in {**head, **_totals(figures)}.items())]]
    names = {
        "ttft_seconds": "time to first token",
        "inter_token_seconds": "between pieces of text",
        "tpot_seconds": "per token after the first",
        "end_to_end_seconds": "end to end",
    }
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    latencies = [["milliseconds", *columns]]
    for key, name in names.items():
        values = figures[key]
        latencies.append([name, *(_milliseconds(values[column]) if values else "-" for column in columns)])
    tables.append(latencies)
    if figures["errors"]:
        rows = [[error["kind"], str(error["count"]), error["example"]] for error in figures["errors"]]
        tables.append([["error", "requests", "for example"], *rows])
    return tables


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _totals(figures: Mapping[str, Any]) -> dict[str, str]:
    requests, tokens, rates = figures["requests"], figures["tokens"], figures["per_second"]
    generator = figures["generator"]
    uncounted = "" if tokens["counted_by"] == "server" else "; the server does not count tokens"
    totals = {
        "requests": f"{requests['completed']} completed, {requests['failed']} failed",
        "duration": f"{figures['seconds']:.2f} s{', interrupted' if figures['interrupted'] else ''}",
        "tokens": f"{tokens['prompt']} in, {tokens['output']} out in {tokens['chunks']} chunks{uncounted}",
        "requests/s": f"{rates['requests']:.2f}",
        "output tokens/s": f"{rates['output_tokens']:.1f}",
        "total tokens/s": f"{rates['total_tokens']:.1f}",
    }
    if good := figures["goodput"]:
        slos = ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in good["slos_seconds"].items())
        totals["goodput"] = f"{good['requests_per_second']:.2f} requests/s, {good['share']:.0%} ({slos})"
    totals["load generator"] = (
        f"{generator['cpu_share']:.1%} of a core; requests started at most"
        f" {1000 * generator['max_start_lag_seconds']:.0f} ms late"
    )
    return totals
