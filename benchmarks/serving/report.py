"""Renders the results as Markdown: targets, floors, then a table for each model, dtype and workload.

Each engine of the plan has a row, with results or with the reason why it has none. Incomplete runs are
marked.

    python -m benchmarks.serving.report RESULTS.json
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.serving.extent import extent, shortfalls
from benchmarks.serving.figures import spread
from benchmarks.serving.plan import Cell, Place
from benchmarks.serving.record import Record
from benchmarks.serving.session import is_noisy
from benchmarks.serving.shapes import MODELS
from benchmarks.serving.systems import OURS, SYSTEMS
from benchmarks.serving.targets import Verdict, times_cut_short, verdicts
from benchmarks.serving.workloads import KINDS

MILLISECONDS = 1e3
MIB = 2**20
GIGA = 1e9
READ_RATES = ("weights_bytes_per_second", "memory_bytes_per_second")
SMALL_SHARE = 0.1
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
    parts = [_head(record), _targets(verdicts(record)), _floors(record)]
    parts += [_cell_table(record, place) for place in _places(record)]
    parts.append(_loads(record))
    return "\n\n".join(parts) + "\n"


def _places(record: Record) -> list[Place]:
    """All that were asked for, whether anything ran or not."""
    cells = [*(run.cell for run in record.runs), *record.cut_short, *record.failures]
    places = {cell.place for cell in cells}
    return sorted(
        places, key=lambda one: (list(MODELS).index(one.model), one.dtype, list(KINDS).index(one.workload))
    )


def _head(record: Record) -> str:
    facts, limits = record.content["machine"], record.content["limits"]
    busy = sum(is_noisy(run.figures) for run in record.runs)
    steps = f"{limits['token_budget']} tokens a step, {limits['max_seqs']} sequences"
    begun = [record.content, *record.content.get("continued", [])]
    when = "; continued ".join(f"{one['begun']}, commit {one['machine']['commit']}" for one in begun)
    lines = [
        "# Tokenmill beside other engines",
        f"{facts['cpu']}, {facts['cores']} cores ({', '.join(facts['flags'])}), "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB; {limits['threads']} threads, {steps}; begun {when}.",
        f"In {busy} of {len(record.runs)} runs others took more than 5 % of one processor.",
    ]
    if lacking := shortfalls(record):
        lines.append(f"**This is part of a whole run**: {' '.join(lacking)}")
    return "\n\n".join(lines)


def _targets(found: list[Verdict]) -> str:
    heads = ("against", "workload", "model", "dtype", "target", "measured", "least to most", "repeats", "")
    rows = [
        (
            one.title,
            one.place.workload,
            one.place.model,
            one.place.dtype,
            one.bound,
            "" if one.measured is None else ("> " if one.is_bound else "") + _number(one.measured),
            f"{_number(min(one.each))} to {_number(max(one.each))}" if len(one.each) > 1 else "",
            str(len(one.each) or ""),
            {True: "met", False: "missed", None: "not measured"}[one.is_met]
            + (f": {one.reason}" if one.reason else ""),
        )
        for one in found
    ]
    text = (
        "Ratios of tokens per second are those of the medians; beside them the least and the most of the"
        " repeats, each against the other engine in the same round. Where one has `>`, the other engine was"
        " cut short once its target was decided and others needed the time."
    )
    return f"## Targets\n\n{text}\n\n{table(heads, rows)}"


def _number(value: float) -> str:
    """Two digits after the point; of a small share as many as it takes to see it."""
    return f"{value:.2f}" if value >= SMALL_SHARE else f"{value:.2g}"


def _floors(record: Record) -> str:
    """How far every engine is from the floor of every workload, side by side."""
    measured = {cell.system for cell in [*(run.cell for run in record.runs), *record.cut_short]}
    systems = [name for name in SYSTEMS if name in measured]
    rows = []
    for row in record.content["floors"]:
        place = Place(*(row[name] for name in Place._fields))
        times = [_times_floor(record, Cell(*place, name)) for name in systems]
        reads = "{:.1f} / {:.1f}".format(*(row[name] / GIGA for name in READ_RATES))
        rows.append((*place, reads, f"{row['flops_per_second'] / GIGA:.0f}", f"{row['seconds']:.2f}", *times))
    text = (
        "The floor is the time in which the machine can read and compute what the workload needs, at the"
        " rates that were measured. Beside it how many times as long each engine took, in the median."
    )
    heads = (*Place._fields, "reads weights / memory, GB/s", "computes, GF/s", "floor, s", *systems)
    return f"## Distance from the floor\n\n{text}\n\n{table(heads, rows)}"


def _times_floor(record: Record, cell: Cell) -> str:
    """Empty where there is no floor, or no run."""
    floor = record.floor(cell.place)
    seconds = [run.figures["seconds"] for run in record.runs if run.cell == cell]
    if floor and (least := record.cut_short.get(cell)):
        return f"> {least / floor:.1f}"
    return f"{spread(seconds).median / floor:.1f}" if seconds and floor else ""


def _cell_table(record: Record, place: Place) -> str:
    rows = []
    failures = record.failures
    for system, kind in SYSTEMS.items():
        cell = Cell(*place, system)
        several = [run.figures for run in record.runs if run.cell == cell]
        if several:
            rows.append((kind.title, *_figures(record, cell, several)))
        if seconds := record.cut_short.get(cell):
            rows.append((kind.title, *_cut_short(record, cell, seconds)))
        if cell in failures:
            rows.append((kind.title, f"none: {failures[cell]}", *[""] * (len(COLUMNS) - 2)))
    title = f"## {MODELS[place.model].title}, {place.dtype}: {KINDS[place.workload].title}"
    floor = record.floor(place)
    text = [extent(record, place), f"floor: {floor:.2f} s" if floor else ""]
    return "\n\n".join([title, *filter(None, ["; ".join(filter(None, text))]), table(COLUMNS, rows)])


def _figures(record: Record, cell: Cell, several: list[dict[str, Any]]) -> tuple[str, ...]:
    speed = spread([figures["tokens_per_second"] for figures in several])
    ours = [run.figures["tokens_per_second"] for run in record.runs if run.cell == cell._replace(system=OURS)]
    return (
        f"{speed.median:.1f} ({speed.least:.1f} to {speed.most:.1f})",
        f"{spread(ours).median / speed.median:.2f}" if ours and cell.system != OURS else "",
        f"{spread([figures['cpu_seconds'] for figures in several]).median:.1f}",
        _pair(several, "first_token_seconds"),
        _pair(several, "inter_token_seconds"),
        f"{max(figures['peak_bytes'] for figures in several) / MIB:.0f}",
        _times_floor(record, cell),
        _alike(several),
        str(len(several)),
    )


def _cut_short(record: Record, cell: Cell, seconds: float) -> tuple[str, ...]:
    """A bound of whatever follows from the seconds in which an engine has not ended."""
    times = times_cut_short(record, cell)
    shown = {
        COLUMNS[1]: f"cut short after {seconds:.0f} s",
        COLUMNS[2]: f"> {times:.2f}" if times else "",
        "x floor": _times_floor(record, cell),
    }
    return tuple(shown.get(name, "") for name in COLUMNS[1:])


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
    print(report(Record.read(Path(sys.argv[1]))))
