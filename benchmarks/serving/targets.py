"""What Tokenmill is to reach beside the others, and whether it does.

Law: a target is a ratio of medians of one run, and it is met, missed, or not measured for a reason. Of the
modes of one engine the fastest counts. Knows no tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from benchmarks.serving.plan import MEDIUM, SHORT_CHUNKS, SMALL, SMOLLM2, VLLM, Cell
from benchmarks.serving.record import Record
from benchmarks.serving.systems import OURS, REFERENCE

MODELS = (SMOLLM2, SMALL, MEDIUM)
BOTH = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`at_least`: tokens per second of ours divided by those of the fastest of `systems`."""

    title: str
    systems: tuple[str, ...]
    workloads: tuple[str, ...]
    at_least: float
    dtypes: tuple[str, ...] = ("float32",)
    models: tuple[str, ...] = MODELS


RATIOS = (
    Ratio(title="transformers, one by one", systems=(REFERENCE,), workloads=("mixed",), at_least=6.0),
    Ratio(title="transformers, static", systems=("transformers-static",), workloads=("mixed",), at_least=3.5),
    Ratio(
        title="transformers, continuous",
        systems=("transformers-continuous",),
        workloads=("mixed", "shared-prefix"),
        at_least=3.0,
    ),
    Ratio(
        title="vLLM, its better mode",
        systems=VLLM,
        workloads=("mixed", "shared-prefix", "long-and-chats"),
        at_least=1.25,
        dtypes=BOTH,
    ),
    Ratio(title="llama.cpp", systems=("llama.cpp",), workloads=("mixed",), at_least=2.0, models=(SMOLLM2,)),
    Ratio(
        title="llama.cpp", systems=("llama.cpp",), workloads=("one-stream",), at_least=1.0, models=(SMOLLM2,)
    ),
)
FLOOR_TIMES = {"float32": 2.0, "bfloat16": 3.0}
"""At most so many times the floor, of the workload `mixed`."""
TAIL_TIMES = 2.0
"""The 99th percentile of the seconds between tokens, at most so many times the median."""
HOST_SHARE = 0.03
LOAD_SECONDS = 10.0


class Verdict(NamedTuple):
    """One line of the table. `measured` is None where `reason` says why."""

    model: str
    dtype: str
    workload: str
    title: str
    bound: str
    measured: float | None
    is_met: bool | None
    reason: str = ""


def verdicts(record: Record) -> list[Verdict]:
    """Of all targets that this run has to do with."""
    groups = dict.fromkeys((run.cell.model, run.cell.dtype) for run in record.runs)
    found: list[Verdict] = []
    for model, dtype in groups:
        for ratio in RATIOS:
            if model in ratio.models and dtype in ratio.dtypes:
                found += [_ratio(record, ratio, model, dtype, workload) for workload in ratio.workloads]
        found += [_floor(record, model, dtype), _tail(record, model, dtype), _host(record, model, dtype)]
        found.append(_load(record, model, dtype))
    return found


def medians(record: Record, figure: Callable[[dict[str, Any]], float]) -> dict[Cell, float]:
    """Of a figure, over the repeats of each cell."""
    values: dict[Cell, list[float]] = {}
    for run in record.runs:
        values.setdefault(run.cell, []).append(figure(run.figures))
    return {cell: median(several) for cell, several in values.items()}


def speeds(record: Record) -> dict[Cell, float]:
    return medians(record, lambda figures: float(figures["tokens_per_second"]))


def _ratio(record: Record, target: Ratio, model: str, dtype: str, workload: str) -> Verdict:
    measured = speeds(record)
    ours = measured.get(Cell(model, dtype, workload, OURS))
    theirs = [
        measured[cell] for name in target.systems if (cell := Cell(model, dtype, workload, name)) in measured
    ]
    title, bound = target.title, f">= {target.at_least:g}"
    if ours is None or not theirs:
        reason = _why_not(record, model, dtype, workload, (OURS, *target.systems))
        return Verdict(model, dtype, workload, title, bound, None, None, reason)
    ratio = ours / max(theirs)
    # Where one mode failed, the other is not known to be the better one.
    failed = [name for name in target.systems if Cell(model, dtype, workload, name) in record.failures]
    reason = f"without {', '.join(failed)}, which failed" if failed else ""
    return Verdict(model, dtype, workload, title, bound, ratio, ratio >= target.at_least, reason)


def _why_not(record: Record, model: str, dtype: str, workload: str, systems: Sequence[str]) -> str:
    failures = record.failures
    cells = (Cell(model, dtype, workload, name) for name in systems)
    return next((failures[cell] for cell in cells if cell in failures), "not part of this run")


def _floor(record: Record, model: str, dtype: str) -> Verdict:
    ours = medians(record, lambda figures: float(figures["seconds"])).get(Cell(model, dtype, "mixed", OURS))
    floor = record.floor(model, dtype, "mixed")
    times = ours / floor if ours is not None and floor else None
    return _at_most(model, dtype, "mixed", "the floor", FLOOR_TIMES[dtype], times)


def _tail(record: Record, model: str, dtype: str) -> Verdict:
    def times(figures: dict[str, Any]) -> float:
        seconds = figures["inter_token_seconds"]
        return float(seconds["p99"] / seconds["p50"])

    measured = medians(record, times).get(Cell(model, dtype, "long-and-chats", SHORT_CHUNKS))
    title = "inter-token p99 / p50, own chunk cap"
    return _at_most(model, dtype, "long-and-chats", title, TAIL_TIMES, measured)


def _host(record: Record, model: str, dtype: str) -> Verdict:
    measured = medians(record, lambda figures: float(figures.get("told", {}).get("host_share", 0.0)))
    share = measured.get(Cell(model, dtype, "mixed", OURS))
    return _at_most(model, dtype, "mixed", "share of a step outside of model and sampling", HOST_SHARE, share)


def _load(record: Record, model: str, dtype: str) -> Verdict:
    wanted = {"model": model, "dtype": dtype, "system": OURS}
    seconds = [row["seconds"] for row in record.content["loads"] if wanted.items() <= row.items()]
    return _at_most(model, dtype, "", "seconds to load", LOAD_SECONDS, min(seconds, default=None))


def _at_most(
    model: str, dtype: str, workload: str, title: str, most: float, measured: float | None
) -> Verdict:
    is_met = None if measured is None else measured <= most
    reason = "not part of this run" if measured is None else ""
    return Verdict(model, dtype, workload, title, f"<= {most:g}", measured, is_met, reason)
