"""An hour is kept whatever an engine does, and what was stopped early is a bound."""

from pathlib import Path

import pytest

from benchmarks.serving import __main__ as program
from benchmarks.serving.budget import LONGEST_RUN, Budget, Needs, share
from benchmarks.serving.estimates import Estimates
from benchmarks.serving.plan import SMALL, SMOLLM2, VLLM, Cell, Group, groups, target_cells
from benchmarks.serving.record import Record
from benchmarks.serving.report import report
from benchmarks.serving.systems import OURS, REFERENCE, SERVICE
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
    SERVICE: 20.0,
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
    (SERVICE, "mixed"): 40.0,
    ("llama.cpp", "mixed"): 80.0,
    ("llama.cpp", "one-stream"): 5.2,
    ("llama.cpp-unified", "mixed"): 112.0,
    ("llama.cpp-unified", "one-stream"): 5.2,
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


def measure_targets(record: Record, minutes: float, slow: tuple[str, ...], repeats: int = 3) -> FakeClock:
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
        engines = FakeCrew(seconds, LOADS, clock, warm_up=4.0 / faster)
        left = share(60 * minutes - clock.now, needs[place:])
        measure(engines, record, cells, repeats, seconds=left)
    return clock


@pytest.mark.parametrize("slow", [(), VLLM])
def test_the_cells_of_the_targets_are_measured_within_the_time(record: Record, slow: tuple[str, ...]) -> None:
    clock = measure_targets(record, 55, slow)
    assert clock.now < 58 * 60
    measured = {run.cell for run in record.runs} | set(record.cut_short)
    assert {cell for cell in target_cells() if cell.dtype == "float32"} <= measured
    ratios = [
        one for one in verdicts(record) if one.bound.startswith(">=") and one.place.workload != "one-stream"
    ]
    assert all(
        one.measured for one in ratios if one.place.dtype == "float32" or one.place.workload == "mixed"
    )
    # What is near its target is repeated, in place of waiting for what is far from it.
    assert repeats_of(record, COMPILED) >= 2
    assert record.cut_short[OUR_CELL._replace(system=REFERENCE)] > 6 * 33


def test_without_an_end_everybody_is_waited_for(record: Record) -> None:
    measure_targets(record, float("inf"), (), repeats=1)
    assert not record.cut_short
    assert all(record.has(cell, 0) for cell in target_cells())


def patience(record: Record, cell: Cell, left: float, later: list[Cell], repeats: int = 1) -> float:
    return Budget(estimates=estimates(record), repeats=repeats).patience(cell, later, left, {OURS, *VLLM})


def test_who_has_told_enough_waits_for_nobody_else(record: Record) -> None:
    add_run(record, OUR_CELL, 100.0)
    # Its target is 1.25, so it is decided at 3.25 times ours.
    assert patience(record, EAGER, 340.1, []) == pytest.approx(325.1)
    assert patience(record, EAGER, 600.0, []) == pytest.approx(585.0)
    later = patience(record, EAGER, 600.0, [COMPILED])
    assert later == pytest.approx(585.0 - 155.0)
    assert patience(record, EAGER, 600.0, [COMPILED], repeats=3) == 325.0
    assert patience(record, EAGER, 1e9, [COMPILED]) == LONGEST_RUN


def test_nothing_is_begun_that_could_not_end(record: Record) -> None:
    add_run(record, OUR_CELL, 100.0)
    assert patience(record, EAGER, 200.0, []) == 0
    assert patience(record, OUR_CELL, 1.0, []) == LONGEST_RUN
    loading = Budget(estimates=estimates(record), repeats=1).patience(COMPILED, [], 300.0, {OURS})
    assert loading == 0


def test_who_was_cut_short_gets_what_nobody_else_wants(record: Record) -> None:
    add_run(record, OUR_CELL, 100.0)
    record.add_cut(EAGER._replace(workload=OTHER), 400.0)
    # Ours and the other mode, with their warm-ups, want 155 seconds of these.
    assert patience(record, EAGER, 340.1, []) > 0
    assert patience(record, EAGER, 340.1 + 154, [COMPILED]) == 0
    assert patience(record, EAGER, 340.1 + 156, [COMPILED]) > 0
    # And it is not tried again for less than it has had.
    record.add_cut(EAGER, 400.0)
    assert patience(record, EAGER, 410.0, []) == 0


def test_an_engine_that_never_ends_is_a_bound_and_is_not_loaded_for_nothing(record: Record) -> None:
    cells = [
        cell._replace(workload=name) for name in ("mixed", OTHER) for cell in (OUR_CELL, EAGER, COMPILED)
    ]
    seconds = {**SMOLLM2_SECONDS, **never([cell for cell in cells if cell.system == VLLM[1]])}
    engines = FakeCrew(seconds, LOADS)
    measure(engines, record, cells, 1, seconds=650.0)
    assert set(record.cut_short) == {COMPILED}
    assert record.failures == {COMPILED._replace(workload=OTHER): "no time was left for it"}
    assert engines.events.count(("load", VLLM[1])) == 1
    assert record.has(EAGER._replace(workload=OTHER), 0)


def test_with_time_that_nobody_wants_its_other_workloads_are_tried(record: Record) -> None:
    cells = [cell._replace(workload=name) for name in ("mixed", OTHER) for cell in (OUR_CELL, COMPILED)]
    engines = FakeCrew({**SMOLLM2_SECONDS, (VLLM[1], "mixed"): NEVER}, LOADS)
    measure(engines, record, cells, 1, seconds=4000.0)
    assert set(record.cut_short) == {COMPILED}
    assert record.has(COMPILED._replace(workload=OTHER), 0)
    assert engines.events.count(("load", VLLM[1])) == 2


def test_a_warm_up_that_never_ends_is_no_bound(record: Record) -> None:
    engines = FakeCrew(SMOLLM2_SECONDS, LOADS, warm_up=NEVER)
    measure(engines, record, [EAGER], 1, seconds=1000.0)
    assert not record.cut_short
    assert EAGER in record.failures
    assert engines.clock.now <= 1000.0


def test_repeats_begin_with_what_is_nearest_to_its_target(record: Record) -> None:
    cells = [cell._replace(workload=name) for name in ("mixed", OTHER) for cell in (OUR_CELL, EAGER)]
    engines = FakeCrew({(OURS, ""): 10.0, (VLLM[0], "mixed"): 30.0, (VLLM[0], OTHER): 12.6})
    measure(engines, record, cells, 2, seconds=130.0)
    assert engines.runs[4:] == [(VLLM[0], OTHER), (OURS, OTHER), (VLLM[0], "mixed"), (OURS, "mixed")]


def test_a_repeat_that_does_not_fit_leaves_its_time_to_the_next(record: Record) -> None:
    cells = [cell._replace(workload=name) for name in ("mixed", OTHER) for cell in (OUR_CELL, EAGER)]
    seconds = {(OURS, ""): 10.0, (VLLM[0], "mixed"): 12.6, (VLLM[0], OTHER): 3.0}
    engines = FakeCrew(seconds, loaded={OURS, VLLM[0]})
    measure(engines, record, cells, 2, seconds=35.6 + 20.0)
    assert engines.runs[4:] == [(VLLM[0], OTHER), (OURS, OTHER)]


def test_ours_is_not_repeated_alone(record: Record) -> None:
    engines = FakeCrew({**SMOLLM2_SECONDS, **never([EAGER])}, LOADS)
    measure(engines, record, [OUR_CELL, EAGER], 3)
    assert repeats_of(record, OUR_CELL) == 1
    measure(engines, record, [OUR_CELL], 3)
    assert repeats_of(record, OUR_CELL) == 3


def test_shares_hold_all_first_rounds_and_then_repeats() -> None:
    needs = [Needs(100.0, 30.0), Needs(200.0, 10.0)]
    assert share(340.0, needs) == 100.0 + 30.0
    assert share(150.0, needs) == 50.0
    assert share(150.0, needs[1:]) == 150.0
    assert share(100.0, [Needs(0.0, 0.0), Needs(0.0, 0.0)]) == 50.0


def verdict(record: Record) -> tuple[float | None, bool, bool | None]:
    (found,) = [
        one for one in verdicts(record) if one.title.startswith("vLLM") and one.place == OUR_CELL.place
    ]
    return found.measured, found.is_bound, found.is_met


@pytest.mark.parametrize(
    ("eager", "cut", "said"),
    [
        (None, 20.0, (2.0, True, True)),
        (None, 11.0, (1.1, True, None)),
        (14.0, 20.0, (1.4, False, True)),
        (14.0, 13.0, (1.3, True, True)),
        (14.0, 12.0, (1.2, True, None)),
        (11.0, 10.0, (1.1, False, False)),
    ],
)
def test_a_bound_shows_that_a_target_is_met_and_never_that_it_is_missed(
    record: Record, eager: float | None, cut: float, said: tuple[float, bool, bool | None]
) -> None:
    add_run(record, OUR_CELL, 10.0)
    if eager:
        add_run(record, EAGER, eager)
    record.add_cut(COMPILED, cut)
    measured, is_bound, is_met = verdict(record)
    assert measured == pytest.approx(said[0])
    assert (is_bound, is_met) == said[1:]


def test_a_bound_stands_in_the_tables_as_one(record: Record) -> None:
    add_run(record, OUR_CELL, 10.0)
    record.add_cut(STATIC, 94.0)
    text = report(record)
    assert "| > 9.40 |  |  | met |" in text
    assert "| cut short after 94 s | > 9.40 |" in text
    assert "1 cell was cut short." in text


def test_the_longest_time_is_kept_and_figures_take_its_place(record: Record) -> None:
    record.add_failure(STATIC, "it does not build")
    record.add_cut(STATIC, 20.0)
    record.add_cut(STATIC, 10.0)
    record.add_failure(STATIC, "no time was left for it")
    assert (record.cut_short, record.failures) == ({STATIC: 20.0}, {})
    add_run(record, STATIC, 30.0)
    assert record.cut_short == {}
