"""The results as Markdown: the targets, then a table for each model, dtype and workload.

Law: every engine that was asked has a row, with figures or with the reason why there are none. All from one
record; nothing is measured here.

    python -m benchmarks.serving.report RESULTS.json
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.serving.figures import spread
from benchmarks.serving.plan import Cell
from benchmarks.serving.record import Record
from benchmarks.serving.session import is_noisy
from benchmarks.serving.shapes import MODELS
from benchmarks.serving.systems import OURS, SYSTEMS
from benchmarks.serving.targets import Verdict, verdicts
from benchmarks.serving.workloads import KINDS

MILLISECONDS = 1e3
MIB = 2**20
COLUMNS = (
    "engine",
    "tokens/s (least to most)",
    "Tokenmill is faster by",
    "CPU s",
    "first token p50 / p99, ms",
    "inter-token p50 / p99, ms",
    "peak MiB",
    "x floor",
    "tokens alike",
    "repeats",
)


def report(record: Record) -> str:
    """The whole text."""
    parts = [_head(record), _targets(verdicts(record))]
    places = dict.fromkeys(cell[:3] for cell in [*(run.cell for run in record.runs), *record.failures])
    for model, dtype, workload in sorted(places, key=_order):
        parts.append(_cell_table(record, model, dtype, workload))
    parts.append(_loads(record))
    return "\n\n".join(parts) + "\n"


def _order(place: tuple[str, ...]) -> tuple[int, str, int]:
    model, dtype, workload = place
    return list(MODELS).index(model), dtype, list(KINDS).index(workload)


def _head(record: Record) -> str:
    facts, limits = record.content["machine"], record.content["limits"]
    busy = sum(is_noisy(run.figures) for run in record.runs)
    steps = f"{limits['token_budget']} tokens a step, {limits['max_seqs']} sequences"
    lines = [
        "# Tokenmill beside other engines",
        f"{facts['cpu']}, {facts['cores']} cores ({', '.join(facts['flags'])}), "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB; {limits['threads']} threads, {steps}; "
        f"begun {record.content['begun']}, commit {facts['commit']}.",
        f"In {busy} of {len(record.runs)} runs others took more than 5 % of one processor.",
    ]
    return "\n\n".join(lines)


def _targets(found: list[Verdict]) -> str:
    rows = [
        (
            one.model,
            one.dtype,
            one.workload,
            one.title,
            one.bound,
            "" if one.measured is None else f"{one.measured:.2f}",
            {True: "met", False: "missed", None: "not measured"}[one.is_met]
            + (f": {one.reason}" if one.reason else ""),
        )
        for one in found
    ]
    return "## Targets\n\n" + table(("model", "dtype", "workload", "against", "target", "measured", ""), rows)


def _cell_table(record: Record, model: str, dtype: str, workload: str) -> str:
    rows = []
    failures = record.failures
    for system, kind in SYSTEMS.items():
        cell = Cell(model, dtype, workload, system)
        several = [run.figures for run in record.runs if run.cell == cell]
        if several:
            rows.append((kind.title, *_figures(record, cell, several)))
        if cell in failures:
            rows.append((kind.title, f"none: {failures[cell]}", *[""] * (len(COLUMNS) - 2)))
    floor = record.floor(model, dtype, workload)
    title = f"## {MODELS[model].title}, {dtype}: {KINDS[workload].title}"
    told = f"Floor: {floor:.2f} s.\n\n" if floor else ""
    return f"{title}\n\n{told}{table(COLUMNS, rows)}"


def _figures(record: Record, cell: Cell, several: list[dict[str, Any]]) -> tuple[str, ...]:
    speed = spread([figures["tokens_per_second"] for figures in several])
    ours = [run.figures["tokens_per_second"] for run in record.runs if run.cell == cell._replace(system=OURS)]
    seconds = spread([figures["seconds"] for figures in several]).median
    floor = record.floor(cell.model, cell.dtype, cell.workload)
    return (
        f"{speed.median:.1f} ({speed.least:.1f} to {speed.most:.1f})",
        f"{spread(ours).median / speed.median:.2f}" if ours and cell.system != OURS else "",
        f"{spread([figures['cpu_seconds'] for figures in several]).median:.1f}",
        _pair(several, "first_token_seconds"),
        _pair(several, "inter_token_seconds"),
        f"{max(figures['peak_bytes'] for figures in several) / MIB:.0f}",
        f"{seconds / floor:.1f}" if floor else "",
        _alike(several),
        str(len(several)),
    )


def _pair(several: list[dict[str, Any]], name: str) -> str:
    """The medians over the repeats of the 50th and the 99th percentile."""
    known = [figures[name] for figures in several if figures[name]]
    if not known:
        return ""
    return " / ".join(
        f"{spread([one[at] for one in known]).median * MILLISECONDS:.0f}" for at in ("p50", "p99")
    )


def _alike(several: list[dict[str, Any]]) -> str:
    """Requests with the very tokens of the reference, and the share of tokens before the first other one."""
    known = [figures["agreement"] for figures in several if figures.get("agreement")]
    if not known or not known[0]["of_tokens"]:
        return ""
    one = known[0]
    return f"{one['requests']} of {one['of_requests']}, {one['tokens'] / one['of_tokens']:.0%}"


def _loads(record: Record) -> str:
    rows = [
        (
            row["model"],
            row["dtype"],
            SYSTEMS[row["system"]].title,
            f"{row['seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
        )
        for row in record.content["loads"]
    ]
    return "## Loading\n\n" + table(("model", "dtype", "engine", "seconds", "CPU s"), rows)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table. A bar in a text would end its cell."""
    heads = list(columns)
    lines = [heads, ["---"] * len(heads), *([value.replace("|", "\\|") for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(report(Record(Path(sys.argv[1]), {})))
