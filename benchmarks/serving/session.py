"""Measures one group, alternating over workloads and engines so that a drift of the machine affects all.

A cell ends with results, with the time after which it was stopped early, or with a reason. A repeat starts
only if the last one suggests that there is time for it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.serving.budget import LONGEST_LOAD, LONGEST_RUN, Budget
from benchmarks.serving.children import Answer, Failed, TooSlow
from benchmarks.serving.engine_processes import EngineProcesses
from benchmarks.serving.figures import agreement, run_figures
from benchmarks.serving.machine import available_bytes, load_average
from benchmarks.serving.plan import OWN, Cell, Group, reason_against, repeats_of
from benchmarks.serving.protocol import Served
from benchmarks.serving.record import Record
from benchmarks.serving.references import CHECKED_REQUESTS, References
from benchmarks.serving.shapes import BYTES, Shape
from benchmarks.serving.systems import OPEN, OURS
from benchmarks.serving.targets import distance
from benchmarks.serving.workloads import WARM_UP, Workload, make_workload

MEMORY_SHARE = 0.8
"""Of what is free, that all engines of a group may take together."""
OVERHEAD_BYTES = 700 * 2**20
"""Of an engine's libraries and activations."""
LEAST_WARM_UP = 60.0
"""Seconds that an engine has for its warm-up at least: what it does only once may take that long."""
MOST_TIMES_AGAIN, MORE_AGAIN = 3.0, 10.0
"""A repeat has so many times the seconds that the last one took, and so many more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`deadline`: on the clock, when the group's share of the time is over. `budget`: says how it is used."""

    group: Group
    cells: list[Cell]
    shape: Shape
    kv_bytes: int
    num_requests: int
    deadline: float
    record: Record
    budget: Budget
    references: References
    clock: Callable[[], float] = time.monotonic

    def measure(self, engines: EngineProcesses) -> None:
        """The first run of every cell, and then all repeats that there is time for."""
        keeps_all = fits(self.cells, self.shape, self.kv_bytes, self.group.dtype, available_bytes())
        cells = list(in_turns(self._wanted(0), 0, by_system=not keeps_all))
        for place, cell in enumerate(cells):
            self._release_others(engines, cell.system, keeps_all)
            self._measure_first(engines, cell, cells[place + 1 :])
        for repeat in range(1, self.budget.repeats):
            for several in self._parts(self._wanted(repeat), keeps_all):
                self._measure_again(engines, several, repeat, keeps_all)

    def _wanted(self, repeat: int) -> list[Cell]:
        return [cell for cell in self.cells if self._is_wanted(cell, repeat)]

    def _is_wanted(self, cell: Cell, repeat: int) -> bool:
        if reason := reason_against(cell):
            self.record.add_failure(cell, reason)
            return False
        if repeat and (cell in self.record.failures or cell in self.record.cut_short or self._is_alone(cell)):
            return False
        return repeat < repeats_of(cell, self.budget.repeats) and not self.record.has(cell, repeat)

    def _is_alone(self, cell: Cell) -> bool:
        """Nobody whom it was to be compared with gave a figure, so one more of its own would show nothing."""
        others = [one for one in self.cells if one.place == cell.place and one.system not in OWN]
        return bool(others) and not any(self.record.has(one, 0) for one in others)

    def _parts(self, cells: list[Cell], keeps_all: bool) -> list[list[Cell]]:
        """What is repeated together or not at all: a workload, the nearest to its target first."""
        if not keeps_all:
            return [cells] if cells else []
        places = dict.fromkeys(cell.place for cell in cells)
        nearest = sorted(places, key=lambda place: distance(self.record, place))
        return [[cell for cell in cells if cell.place == place] for place in nearest]

    def _left(self) -> float:
        return self.deadline - self.clock()

    def _release_others(self, engines: EngineProcesses, system: str, keeps_all: bool) -> None:
        for other in () if keeps_all else {cell.system for cell in self.cells} - {system}:
            engines.release(other)

    def _measure_first(self, engines: EngineProcesses, cell: Cell, later: list[Cell]) -> None:
        reference = self._reference(engines, cell, [cell, *later]) if cell.workload not in OPEN else None

        def patience() -> float:
            return self.budget.patience(cell, later, self._left(), engines.loaded)

        if not patience():
            self._tell_failure(cell, "no time was left for it")
            return
        # Also where it was ready later than was thought: it is not loaded for nothing.
        self._measure_cell(engines, cell, 0, lambda: max(self.budget.least(cell), patience()), reference)

    def _measure_again(
        self, engines: EngineProcesses, cells: list[Cell], repeat: int, keeps_all: bool
    ) -> None:
        """All of these cells once more, or none of them."""
        estimates = self.budget.estimates
        expected = sum(map(estimates.run, cells)) + estimates.loads(cells, engines.loaded)
        if expected > self._left():
            workloads = ", ".join(dict.fromkeys(cell.workload for cell in cells))
            print(f"  no time for repeat {repeat + 1} of {workloads}", file=sys.stderr, flush=True)
            return
        # In turn forwards and backwards, so that nobody always runs first.
        for cell in in_turns(cells, repeat, by_system=not keeps_all):
            self._release_others(engines, cell.system, keeps_all)
            self._measure_cell(engines, cell, repeat, partial(self._patience_again, cell))

    def _patience_again(self, cell: Cell) -> float:
        if cell.system in OWN:
            return LONGEST_RUN
        return MOST_TIMES_AGAIN * self.budget.estimates.run(cell) + MORE_AGAIN

    def _measure_cell(
        self,
        engines: EngineProcesses,
        cell: Cell,
        repeat: int,
        patience: Callable[[], float],
        reference: list[list[int]] | None = None,
    ) -> None:
        """`patience`: asked when the engine is ready, how long its run may take."""
        try:
            workload = self._workload(cell, repeat)
            load_limit = min(LONGEST_LOAD, max(patience(), self._left()))
            engines.prepare(
                cell.system,
                self._workload(cell, WARM_UP),
                load_limit=load_limit,
                limit=max(LEAST_WARM_UP, patience()),
            )
            load = load_average()
            answer, peak_bytes = engines.serve(cell.system, workload, patience())
            figures = figures_of(workload, answer, peak_bytes) | {"load_average": load}
        except TooSlow as error:
            self._tell_slowness(cell, repeat, error.seconds)
            return
        except (Failed, ValueError) as error:
            self._tell_failure(cell, str(error))
            return
        if reference is not None:
            figures["agreement"] = agreement(reference, answer.message["tokens"])._asdict()
        self.record.add_run(cell, repeat, figures)
        tell(cell, repeat, figures)

    def _tell_slowness(self, cell: Cell, repeat: int, seconds: float) -> None:
        if repeat:
            self._tell_failure(cell, f"repeat {repeat + 1} had not ended after {seconds:.0f} s")
            return
        self.record.add_cut(cell, seconds)
        say(cell, f"cut short after {seconds:.0f} s")

    def _tell_failure(self, cell: Cell, reason: str) -> None:
        self.record.add_failure(cell, reason)
        say(cell, f"FAILED: {reason}")

    def _workload(self, cell: Cell, repeat: int) -> Workload:
        return make_workload(
            cell.workload,
            vocab_size=self.shape.vocab_size,
            repeat=repeat,
            num_requests=self.num_requests,
            requests_per_second=self._capacity(),
        )

    def _capacity(self) -> float | None:
        """Requests per second that our engine served when all were there at once, in its first repeat."""
        first = Cell(*self.group, "mixed", OURS)
        found = (run.figures["requests_per_second"] for run in self.record.runs if run.cell == first)
        return next(found, None)

    def _reference(self, engines: EngineProcesses, cell: Cell, coming: list[Cell]) -> list[list[int]] | None:
        """The right tokens of the first requests, or None where they cannot be had in time."""
        unclaimed = self._left() - self.budget.estimates.first_round(coming, engines.loaded)
        limit = self.budget.estimates.reference(cell.place, CHECKED_REQUESTS)
        try:
            return self.references.tokens(
                engines,
                self.group,
                self._workload(cell, 0),
                self._workload(cell, WARM_UP),
                limit if limit <= unclaimed else 0.0,
            )
        except Failed as error:
            say(cell, f"no reference: {error}")
            return None


def figures_of(workload: Workload, answer: Answer, peak_bytes: int) -> dict[str, Any]:
    """Of one run. Raises `ValueError` when a request has not its tokens."""
    pairs = zip(answer.message["tokens"], answer.message["times"], strict=True)
    figures = run_figures(workload.requests, [Served(tokens, times) for tokens, times in pairs])
    return {
        **figures,
        "cpu_seconds": answer.cpu_seconds,
        "other_cpu_seconds": answer.other_cpu_seconds,
        "peak_bytes": peak_bytes,
        **({"details": answer.message["details"]} if answer.message["details"] else {}),
    }


def fits(cells: list[Cell], shape: Shape, kv_bytes: int, dtype: str, free_bytes: int) -> bool:
    """Whether all engines of a group can be loaded at once."""
    # An embedding of its own, and packed copies of weights, are allowed for.
    one = 2 * shape.weights * BYTES[dtype] + kv_bytes + OVERHEAD_BYTES
    return one * len({cell.system for cell in cells}) < MEMORY_SHARE * free_bytes


def in_turns(cells: list[Cell], repeat: int, *, by_system: bool) -> Iterator[Cell]:
    """Workload by workload, or engine by engine, in the plan's order; every second repeat has the engines
    backwards."""
    major, minor = ("system", "workload") if by_system else ("workload", "system")
    majors = list(dict.fromkeys(getattr(cell, major) for cell in cells))
    for value in majors:
        same = [cell for cell in cells if getattr(cell, major) == value]
        backwards = repeat % 2 == 1 and minor == "system"
        yield from reversed(same) if backwards else same


def say(cell: Cell, text: str) -> None:
    print(f"  {cell.workload:<15} {cell.system:<24} {text}", file=sys.stderr, flush=True)


def tell(cell: Cell, repeat: int, figures: dict[str, Any]) -> None:
    alike = figures.get("agreement")
    say(
        cell,
        f"{repeat + 1}: {figures['tokens_per_second']:8.1f} tokens/s"
        f" {figures['seconds']:7.1f} s {figures['cpu_seconds']:7.1f} CPU s"
        f" {figures['peak_bytes'] / 2**20:6.0f} MiB"
        + (f"  {alike['requests']}/{alike['of_requests']} alike" if alike else "")
        + (f"  (others took {figures['other_cpu_seconds']:.1f} CPU s)" if is_noisy(figures) else ""),
    )


def is_noisy(figures: dict[str, Any]) -> bool:
    """Others took more than a twentieth of one processor's time."""
    noisy: bool = figures["other_cpu_seconds"] > 0.05 * figures["seconds"]
    return noisy
