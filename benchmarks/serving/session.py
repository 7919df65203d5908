"""One group measured: repeats go round over workloads and engines, so that whatever drifts meets all of them.

Law: a cell ends as figures or as a reason, never as neither. A further round is begun only if there is time
for it, judged by the last one. Knows no tables.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.children import Answer, Failed
from benchmarks.serving.crew import Crew
from benchmarks.serving.figures import agreement, run_figures
from benchmarks.serving.machine import available_bytes, load_average
from benchmarks.serving.plan import Cell, Group, reason_against, repeats_of
from benchmarks.serving.protocol import Served
from benchmarks.serving.record import Record
from benchmarks.serving.references import References
from benchmarks.serving.shapes import BYTES, Shape
from benchmarks.serving.systems import OPEN, OURS
from benchmarks.serving.workloads import WARM_UP, Workload, make_workload

MEMORY_SHARE = 0.8
"""Of what is free, that all engines of a group may take together."""
OVERHEAD_BYTES = 700 * 2**20
"""Of an engine's libraries and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`deadline`: on the monotonic clock, after which no round begins but the first."""

    group: Group
    cells: list[Cell]
    shape: Shape
    kv_bytes: int
    num_requests: int
    repeats: int
    deadline: float
    record: Record
    references: References

    def measure(self, crew: Crew) -> None:
        """All rounds that there is time for."""
        keeps_all = fits(self.cells, self.shape, self.kv_bytes, self.group.dtype, available_bytes())
        for repeat in range(self.repeats):
            wanted = [cell for cell in self.cells if self._is_wanted(cell, repeat)]
            if repeat and time.monotonic() + self._expected_seconds(wanted) > self.deadline:
                print(f"  no time for repeat {repeat + 1}", file=sys.stderr, flush=True)
                return
            # In turn forwards and backwards, so that nobody always runs first.
            for cell in in_turns(wanted, repeat, by_system=not keeps_all):
                if not keeps_all:
                    self._release_others(crew, cell.system)
                self._measure_cell(crew, cell, repeat)

    def _is_wanted(self, cell: Cell, repeat: int) -> bool:
        if reason := reason_against(cell):
            self.record.add_failure(cell, reason)
            return False
        if repeat and cell in self.record.failures:
            return False
        return repeat < repeats_of(cell.system, self.repeats) and not self.record.has(cell, repeat)

    def _expected_seconds(self, cells: list[Cell]) -> float:
        last = {run.cell: run.figures["seconds"] for run in self.record.runs}
        return sum(float(last.get(cell, 0.0)) for cell in cells)

    def _release_others(self, crew: Crew, system: str) -> None:
        for other in {cell.system for cell in self.cells} - {system}:
            crew.release(other)

    def _measure_cell(self, crew: Crew, cell: Cell, repeat: int) -> None:
        try:
            workload = self._workload(cell, repeat)
            reference = self._reference(crew, cell) if repeat == 0 and cell.workload not in OPEN else None
            load = load_average()
            answer, peak_bytes = crew.serve(cell.system, workload, self._workload(cell, WARM_UP))
            figures = figures_of(workload, answer, peak_bytes) | {"load_average": load}
        except (Failed, ValueError) as error:
            self.record.add_failure(cell, str(error))
            print(f"  {cell.workload:<15} {cell.system:<24} FAILED: {error}", file=sys.stderr, flush=True)
            return
        if reference is not None:
            figures["agreement"] = agreement(reference, answer.message["tokens"])._asdict()
        self.record.add_run(cell, repeat, figures)
        tell(cell, repeat, figures)

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

    def _reference(self, crew: Crew, cell: Cell) -> list[list[int]] | None:
        """The right tokens of the first requests, or None where they cannot be had."""
        try:
            return self.references.tokens(
                crew, self.group, self._workload(cell, 0), self._workload(cell, WARM_UP)
            )
        except Failed as error:
            print(f"  no reference for {cell.workload}: {error}", file=sys.stderr, flush=True)
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
        **({"told": answer.message["told"]} if answer.message["told"] else {}),
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


def tell(cell: Cell, repeat: int, figures: dict[str, Any]) -> None:
    alike = figures.get("agreement")
    print(
        f"  {cell.workload:<15} {cell.system:<24} {repeat + 1}: {figures['tokens_per_second']:8.1f} tokens/s"
        f" {figures['seconds']:7.1f} s {figures['cpu_seconds']:7.1f} CPU s"
        f" {figures['peak_bytes'] / 2**20:6.0f} MiB"
        + (f"  {alike['requests']}/{alike['of_requests']} alike" if alike else "")
        + (f"  (others took {figures['other_cpu_seconds']:.1f} CPU s)" if is_noisy(figures) else ""),
        file=sys.stderr,
        flush=True,
    )


def is_noisy(figures: dict[str, Any]) -> bool:
    """Others took more than a twentieth of one processor's time."""
    noisy: bool = figures["other_cpu_seconds"] > 0.05 * figures["seconds"]
    return noisy
