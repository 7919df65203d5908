"""An hour is kept whatever an engine does, and what was given up is told as a bound."""

from pathlib import Path

import pytest

from benchmarks.serving import __main__ as program
from benchmarks.serving.budget import LONGEST_RUN, Budget, Needs, share
from benchmarks.serving.estimates import Estimates
from benchmarks.serving.plan import SMALL, SMOLLM2, VLLM, Cell, Group, groups, target_cells
from benchmarks.serving.record import Record
from benchmarks.serving.systems import OURS, REFERENCE
from benchmarks.serving.targets import verdicts
from tests.benchmarks.fake_engines import NEVER, FakeClock, FakeCrew, measure
from tests.benchmarks.made_record import FACTS, OUR_CELL, figures

GROUP = Group(SMOLLM2, "float32")
EAGER, COMPILED = (OUR_CELL._replace(system=name) for name in VLLM)
STATIC = OUR_CELL._replace(system="transformers-static")
OTHER = "shared-prefix"
LOADS = {
    REFERENCE: 9.0,
    OURS: 12.0,
    "tokenmill-short-chunks": 12.0,
    VLLM[0]: 23.0,
    VLLM[1]: 130.0,
    "transformers-static": 9.0,
}
SMOLLM2_SECONDS = {
    (OURS, "mixed"): 33.0,
    (OURS, OTHER): 37.0,
    (OURS, "one-stream"): 5.4,
    (OURS, "long-and-chats"): 54.0,
    ("tokenmill-short-chunks", ""): 66.0,
    (REFERENCE, "mixed"): 510.0,
    ("transformers-static", ""): 135.0,
    ("transformers-continuous", "mixed"): 193.0,
    ("transformers-continuous", OTHER): 400.0,
    (VLLM[0], "mixed"): 45.0,
    (VLLM[0], OTHER): 57.0,
    (VLLM[0], "long-and-chats"): 90.0,
    (VLLM[1], "mixed"): 40.0,
    (VLLM[1], OTHER): 49.0,
    (VLLM[1], "long-and-chats"): 77.0,
    ("llama.cpp", "mixed"): 112.0,
    ("llama.cpp", "one-stream"): 5.2,
}
"""As measured on two cores, in float32."""


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.begin(tmp_path / "results.json", FACTS)


def estimates(record: Record) -> Estimates:
    return Estimates(group=GROUP, record=record)


def add_run(record: Record, cell: Cell, seconds: float, repeat: int = 0) -> None:
    record.add_run(cell, repeat, figures(100 / seconds))


def never(cells: list[Cell]) -> dict[tuple[str, str], float]:
    return {(cell.system, cell.workload): NEVER for cell in cells}


def repeats_of(record: Record, cell: Cell) -> int:
    return sum(run.cell == cell for run in record.runs)


def measure_targets(record: Record, directory: Path, minutes: float, slow: tuple[str, ...]) -> FakeClock:
    """All cells of the targets, as the command shares its time out. The random model takes an eighth, and the
    engines named `slow` never end in bfloat16."""
    clock = FakeClock()
    args = program.parse([])
    grouped = groups(target_cells())
    needs = [program.needs_of(group, cells, args, record) for group, cells in grouped.items()]
    for place, (group, cells) in enumerate(grouped.items()):
        faster = 8 if group.model == SMALL else 1
        seconds = {name: value / faster for name, value in SMOLLM2_SECONDS.items()}
        if group.dtype == "bfloat16":
            seconds |= never([cell for cell in cells if cell.system in slow])
        # The reference's tokens are asked of the same engine, and are few.
        seconds[REFERENCE, ""] = 60.0 / faster
        crew = FakeCrew(seconds, LOADS, clock, warm_up=4.0 / faster)
        left = share(60 * minutes - clock.now, needs[place:])
        measure(crew, record, directory, cells, 3, seconds=left)
    return clock


@pytest.mark.parametrize("slow", [(), VLLM])
def test_the_cells_of_the_targets_are_measured_within_the_time(
    tmp_path: Path, record: Record, slow: tuple[str, ...]
) -> None:
    clock = measure_targets(record, tmp_path, 55, slow)
    assert clock.now < 58 * 60
    told = {run.cell for run in record.runs} | set(record.cut_short)
    assert {cell for cell in target_cells() if cell.dtype == "float32"} <= told
    ratios = [
        one for one in verdicts(record) if one.bound.startswith(">=") and one.place.workload != "one-stream"
    ]
    assert all(
        one.measured for one in ratios if one.place.dtype == "float32" or one.place.workload == "mixed"
    )
    # What is near its target is repeated, in place of waiting for what is far from it.
    assert repeats_of(record, COMPILED) >= 2
    assert record.cut_short[OUR_CELL._replace(system=REFERENCE)] > 6 * 33


def test_without_an_end_everybody_is_waited_for(tmp_path: Path, record: Record) -> None:
    measure_targets(record, tmp_path, float("inf"), ())
    assert not record.cut_short
    assert all(record.has(cell, 0) for cell in target_cells())
