"""Defines what Tokenmill is to reach beside the other engines, and decides whether it does.

A target is a ratio of medians within one run; it is met, missed, or not measured for a reason. Of the modes
of one engine the fastest counts. An engine that was stopped early gives a bound, which can show that a target
is met, never that it is missed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from benchmarks.serving.plan import LLAMA_CPP, MEDIUM, SHORT_CHUNKS, SMALL, SMOLLM2, VLLM, Cell, Group, Place
from benchmarks.serving.record import Record
from benchmarks.serving.systems import OURS, REFERENCE, modes_of

MODELS = (SMOLLM2, SMALL, MEDIUM)
BOTH = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`at_least`: tokens per second of ours divided by those of the fastest of `systems`, with the best of
    the budgets that they were measured with."""

    title: str
    systems: tuple[str, ...]
    workloads: tuple[str, ...]
    at_least: float
    dtypes: tuple[str, ...] = ("float32",)
    models: tuple[str, ...] = MODELS

    def is_of(self, place: Place) -> bool:
        return place.workload in self.workloads and place.dtype in self.dtypes and place.model in self.models


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
    Ratio(
        title="llama.cpp, its better mode",
        systems=LLAMA_CPP,
        workloads=("mixed",),
        at_least=2.0,
        models=(SMOLLM2,),
    ),
    Ratio(
        title="llama.cpp, its better mode",
        systems=LLAMA_CPP,
        workloads=("one-stream",),
        at_least=1.0,
        models=(SMOLLM2,),
    ),
)
FLOOR_TIMES = {"float32": 2.0, "bfloat16": 3.0}
"""At most so many times the floor, of the workload `mixed`."""
TAIL_TIMES = 2.0
"""The 99th percentile of the seconds between tokens, at most so many times the median."""
HOST_SHARE = 0.03
LOAD_SECONDS = 10.0
"""Of the default model, when it is started again."""
NOT_PART = "not part of this run"


class Verdict(NamedTuple):
    """One line of the table. `measured` is None where `reason` says why. `each`: the same figure of every
    repeat by itself, in their order. `is_bound`: what was measured is more than `measured`."""

    place: Place
    title: str
    bound: str
    measured: float | None
    is_met: bool | None
    each: tuple[float, ...] = ()
    reason: str = ""
    is_bound: bool = False


def verdicts(record: Record) -> list[Verdict]:
    """Of all targets that this run has to do with, in the order of the targets."""
    groups = list(dict.fromkeys(Group(run.cell.model, run.cell.dtype) for run in record.runs))
    found = [
        _ratio(record, ratio, Place(*group, workload))
        for ratio in RATIOS
        for workload in ratio.workloads
        for group in groups
        if group.model in ratio.models and group.dtype in ratio.dtypes
    ]
    for judge in (_floor, _tail, _host):
        found += [judge(record, group) for group in groups]
    return found + [_load(record, group) for group in groups if group.model == SMOLLM2]


def repeats_of_cell(
    record: Record, cell: Cell, figure: Callable[[dict[str, Any]], float | None]
) -> dict[int, float]:
    """A figure of each repeat that has it."""
    found = ((run.repeat, figure(run.figures)) for run in record.runs if run.cell == cell)
    return {repeat: value for repeat, value in found if value is not None}


def speeds(record: Record, cell: Cell) -> dict[int, float]:
    return repeats_of_cell(record, cell, lambda figures: float(figures["tokens_per_second"]))


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, ...]:
    """Of each of our repeats, to theirs of the same round, or to their median where they ran less often."""
    usual = median(theirs.values())
    return tuple(value / theirs.get(repeat, usual) for repeat, value in sorted(ours.items()))


def at_least(cell: Cell) -> float | None:
    """The ratio that ours is to reach over this engine; None where it has no target."""
    found = (
        one
        for one in RATIOS
        if any(cell.system in modes_of(name) for name in one.systems) and one.is_of(cell.place)
    )
    return next((one.at_least for one in found), None)


def distance(record: Record, place: Place) -> float:
    """How many times the nearest of its ratios is above or below its target, as a logarithm. Infinite where
    none was measured."""
    found = ((one, _ratio(record, one, place)) for one in RATIOS if one.is_of(place))
    known = (abs(math.log(said.measured / one.at_least)) for one, said in found if said.measured)
    return min(known, default=math.inf)


def times_cut_short(record: Record, cell: Cell) -> float | None:
    """Ours is faster by more than so much than an engine that was cut short: they had the same requests."""
    seconds = record.cut_short.get(cell)
    ours = repeats_of_cell(record, cell._replace(system=OURS), lambda figures: float(figures["seconds"]))
    return seconds / median(ours.values()) if seconds and ours else None


def _ratio(record: Record, target: Ratio, place: Place) -> Verdict:
    cells = [Cell(*place, mode) for name in target.systems for mode in modes_of(name)]
    ours = speeds(record, Cell(*place, OURS))
    theirs = [found for cell in cells if (found := speeds(record, cell))]
    bounds = [times for cell in cells if (times := times_cut_short(record, cell))]
    verdict = Verdict(place, target.title, f">= {target.at_least:g}", None, None)
    if not ours or not (theirs or bounds):
        return verdict._replace(reason=_why_not(record, place, (OURS, *target.systems)))
    # Where one mode gave no figure, the other is not known to be the better one.
    failed = [cell.system for cell in cells if cell in record.failures and not speeds(record, cell)]
    verdict = verdict._replace(reason=f"without {', '.join(failed)}, which gave no figure" if failed else "")
    fastest = max(theirs, key=lambda one: median(one.values()), default={})
    ratio = median(ours.values()) / median(fastest.values()) if fastest else math.inf
    bound = min(bounds, default=math.inf)
    if bound >= ratio or ratio < target.at_least:
        is_met = ratio >= target.at_least
        return verdict._replace(measured=ratio, is_met=is_met, each=ratios(ours, fastest))
    if bound >= target.at_least:
        return verdict._replace(measured=bound, is_met=True, is_bound=True)
    return verdict._replace(measured=bound, is_bound=True, reason="cut short before its target was decided")


def _why_not(record: Record, place: Place, systems: Sequence[str]) -> str:
    failures = record.failures
    cells = (Cell(*place, name) for name in systems)
    return next((failures[cell] for cell in cells if cell in failures), NOT_PART)


def _floor(record: Record, group: Group) -> Verdict:
    place = Place(*group, "mixed")
    ours = repeats_of_cell(record, Cell(*place, OURS), lambda figures: float(figures["seconds"]))
    floor = record.floor(place)
    times = tuple(seconds / floor for seconds in ours.values()) if floor else ()
    return _at_most(place, "the floor", FLOOR_TIMES[group.dtype], times)


def _tail(record: Record, group: Group) -> Verdict:
    def times(figures: dict[str, Any]) -> float | None:
        seconds = figures["inter_token_seconds"]
        return float(seconds["p99"] / seconds["p50"]) if seconds else None

    place = Place(*group, "long-and-chats")
    found = repeats_of_cell(record, Cell(*place, SHORT_CHUNKS), times)
    return _at_most(place, "inter-token p99 / p50, own chunk cap", TAIL_TIMES, tuple(found.values()))


def _host(record: Record, group: Group) -> Verdict:
    place = Place(*group, "mixed")
    shares = repeats_of_cell(
        record, Cell(*place, OURS), lambda figures: figures.get("details", {}).get("host_share")
    )
    title = "share of a step outside of model and sampling"
    return _at_most(place, title, HOST_SHARE, tuple(shares.values()))


def _load(record: Record, group: Group) -> Verdict:
    """The least counts: a first start may have had to convert and to compile."""
    wanted = {**group._asdict(), "system": OURS}.items()
    seconds = tuple(row["seconds"] for row in record.content["loads"] if wanted <= row.items())
    return _at_most(Place(*group, ""), "seconds to load", LOAD_SECONDS, seconds, middle=min)


def _at_most(
    place: Place,
    title: str,
    most: float,
    each: tuple[float, ...],
    middle: Callable[[Sequence[float]], float] = median,
) -> Verdict:
    bound = f"<= {most:g}"
    if not each:
        return Verdict(place, title, bound, None, None, reason=NOT_PART)
    measured = middle(each)
    return Verdict(place, title, bound, measured, measured <= most, each)
