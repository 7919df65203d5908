"""Estimates the cost of a group's cells, so that time can be distributed before anything has run.

Estimates decide when a run starts and when it is stopped; they are never reported as results. Measurements in
the record take precedence over the estimates here, which were made on two cores.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from benchmarks.serving.plan import MEDIUM, OWN, SMALL, SMOLLM2, VLLM, Cell, Group, Place, repeats_of
from benchmarks.serving.record import Record, Run
from benchmarks.serving.shapes import MODELS
from benchmarks.serving.systems import OURS, REFERENCE, SERVICE, modes_of
from benchmarks.serving.targets import at_least
from benchmarks.serving.workloads import count_requests

MIXED_SECONDS = {SMALL: 4.0, SMOLLM2: 33.0, MEDIUM: 90.0}
"""Of ours, the whole workload `mixed` of a model."""
TIMES_MIXED = {
    "mixed": 1.0,
    "shared-prefix": 1.1,
    "one-stream": 0.16,
    "open-50": 2.0,
    "open-80": 1.3,
    "open-110": 1.0,
    "long-and-chats": 1.6,
}
"""Workload -> how many times as long as `mixed` it takes ours."""
TIMES_OURS = {
    OURS: 1.0,
    REFERENCE: 16.0,
    "transformers-static": 4.2,
    "transformers-continuous": 6.0,
    "llama.cpp": 2.5,
    "llama.cpp-unified": 3.5,
    "ctranslate2": 4.0,
}
NEAR_TIMES = 1.4
"""As long as ours take those who are not named above."""
LOAD_SECONDS = {
    SERVICE: 20.0,
    **dict.fromkeys(modes_of(VLLM[0]), 25.0),
    **dict.fromkeys(modes_of(VLLM[1]), 130.0),
}
USUAL_LOAD_SECONDS = 12.0
WARM_UP_SHARE = 0.15
"""Of what ours takes for a workload."""
USUAL_TARGET = 3.0
"""Where there is none."""
LEAST_PATIENCE = 80.0
"""Nobody is given up sooner: what takes a minute is not worth a bound in place of a figure."""
LIKELY = 1.5
"""In so many times its estimate a run has nearly surely ended."""
GROUP_SECONDS = 15.0
"""Of what is neither load nor run: to make a model, to measure the machine, to end processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Of one group, in seconds. `portion`: of the requests of a whole workload, that are asked for."""

    group: Group
    record: Record
    portion: float = 1.0

    def ours(self, place: Place) -> float:
        """What ours takes for a workload: as it did last, or by what it took for another one."""
        runs = [
            run for run in self.record.runs if run.cell.system == OURS and run.cell.place[:2] == self.group
        ]
        here = [run for run in runs if run.cell.place == place]
        if here:
            return _seconds(here[-1])
        times = TIMES_MIXED[place.workload]
        if runs:
            return _seconds(runs[0]) / TIMES_MIXED[runs[0].cell.workload] * times
        return MIXED_SECONDS[place.model] * self.portion * times

    def run(self, cell: Cell) -> float:
        """One run, as long as the last one or as many times ours as is usual."""
        known = [run for run in self.record.runs if run.cell == cell]
        usual = TIMES_OURS.get(cell.system, NEAR_TIMES) * self.ours(cell.place)
        return _seconds(known[-1]) if known else usual

    def enough(self, cell: Cell) -> float:
        """After which an engine that has not ended has shown that its target is met by far."""
        target = at_least(cell) or USUAL_TARGET
        return max(LEAST_PATIENCE, max(1.25 * target, target + 2) * self.ours(cell.place))

    def first(self, cell: Cell) -> float:
        """The first run with its warm-up, if it is stopped once its target is decided."""
        run = self.run(cell)
        wanted = run if cell.system in OWN else min(run, self.enough(cell))
        return wanted + self.warm_up(cell)

    def warm_up(self, cell: Cell) -> float:
        return WARM_UP_SHARE * self.ours(cell.place)

    def reference(self, place: Place, requests: int) -> float:
        """The right tokens of a few requests, with what it takes to be ready and not to be given up early."""
        served = count_requests(place.workload, MODELS[place.model].num_requests) * self.portion
        return 60.0 + 1.5 * TIMES_OURS[REFERENCE] * self.ours(place) * min(1.0, requests / served)

    def load(self, system: str) -> float:
        loads = self.record.content["loads"]
        wanted = {**self.group._asdict(), "system": system}.items()
        known = [float(row["seconds"]) for row in loads if wanted <= row.items()]
        return known[-1] if known else LOAD_SECONDS.get(system, USUAL_LOAD_SECONDS)

    def loads(self, cells: Iterable[Cell], loaded: Collection[str]) -> float:
        """Of the engines of these cells that are not loaded."""
        return sum(self.load(system) for system in {cell.system for cell in cells} - set(loaded))

    def first_round(self, cells: Collection[Cell], loaded: Collection[str] = ()) -> float:
        return sum(self.first(cell) for cell in cells) + self.loads(cells, loaded)

    def whole_first_round(self, cells: Collection[Cell]) -> float:
        """From nothing: with what a group costs besides."""
        return GROUP_SECONDS + self.first_round(cells) if cells else 0.0

    def repeats(self, cells: Iterable[Cell], repeats: int) -> float:
        """All rounds but the first."""
        return sum(self.run(cell) * (repeats_of(cell, repeats) - 1) for cell in cells)


def _seconds(run: Run) -> float:
    return float(run.figures["seconds"])
