"""What is planned, and in which order it is measured."""

from benchmarks.serving.plan import (
    SMALL,
    SMOLLM2,
    Cell,
    Filter,
    all_cells,
    groups,
    reason_against,
    repeats_of,
    sweep_cells,
    target_cells,
)
from benchmarks.serving.session import fits, in_turns, is_noisy
from benchmarks.serving.shapes import Shape
from benchmarks.serving.systems import BUDGETS, OURS, REFERENCE, SYSTEMS
from benchmarks.serving.targets import RATIOS
from tests.benchmarks.made_record import OUR_CELL


def test_every_target_has_its_cells_in_the_plan_of_the_targets() -> None:
    cells = set(target_cells())
    for ratio in RATIOS:
        for model in {SMOLLM2, SMALL} & set(ratio.models):
            for dtype in ratio.dtypes:
                for workload in ratio.workloads:
                    for system in (OURS, *ratio.systems):
                        assert Cell(model, dtype, workload, system) in cells


def test_a_sweep_has_every_budget_of_every_engine_that_has_one() -> None:
    cells = sweep_cells()
    assert set(cells) <= set(all_cells())
    budgets = {SYSTEMS[cell.system].token_budget for cell in cells if cell.system.startswith("vllm-compiled")}
    assert budgets == {None, *BUDGETS}
    assert OURS in {cell.system for cell in cells}


def test_the_targets_are_part_of_the_whole_matrix() -> None:
    assert set(target_cells()) <= set(all_cells())
    assert len(all_cells()) == len(set(all_cells()))


def test_a_filter_takes_away_and_nothing_filters_nothing() -> None:
    assert all(Filter().keeps(cell) for cell in all_cells())
    kept = [cell for cell in all_cells() if Filter(systems=[OURS], dtypes=["float32"]).keeps(cell)]
    assert {(cell.system, cell.dtype) for cell in kept} == {(OURS, "float32")}


def test_open_loops_come_after_what_tells_their_capacity() -> None:
    for members in groups(reversed(all_cells())).values():
        workloads = [cell.workload for cell in members]
        assert workloads.index("open-50") > workloads.index("mixed")


def test_what_a_batch_cannot_do_has_its_reason() -> None:
    assert reason_against(Cell(SMALL, "float32", "open-80", "ctranslate2"))
    assert reason_against(Cell(SMALL, "float32", "open-80", OURS)) is None


def test_slow_ones_are_repeated_less() -> None:
    assert repeats_of(OUR_CELL._replace(system=REFERENCE), 3) == 1
    assert repeats_of(OUR_CELL._replace(system="llama.cpp"), 3) == 1
    assert repeats_of(OUR_CELL._replace(system="llama.cpp", workload="one-stream"), 3) == 3
    assert repeats_of(OUR_CELL, 3) == 3


def test_engines_take_turns_within_a_workload_and_backwards_every_second_time() -> None:
    cells = [Cell(SMALL, "float32", workload, name) for workload in ("a", "b") for name in ("x", "y")]
    said = [f"{cell.workload}{cell.system}" for cell in in_turns(cells, 0, by_system=False)]
    assert said == ["ax", "ay", "bx", "by"]
    said = [f"{cell.workload}{cell.system}" for cell in in_turns(cells, 1, by_system=False)]
    assert said == ["ay", "ax", "by", "bx"]
    said = [f"{cell.workload}{cell.system}" for cell in in_turns(cells, 1, by_system=True)]
    assert said == ["ax", "bx", "ay", "by"]


def test_engines_are_loaded_together_only_where_memory_holds_all() -> None:
    shape = Shape(vocab_size=1, layer_weights=10**9, head_weights=0, kv_elements=1, score_elements=1)
    cells = [OUR_CELL, OUR_CELL._replace(system=REFERENCE)]
    assert not fits(cells, shape, 0, "float32", 18 * 10**9)
    assert fits(cells, shape, 0, "bfloat16", 18 * 10**9)


def test_a_run_is_noisy_when_others_work() -> None:
    assert is_noisy({"other_cpu_seconds": 0.6, "seconds": 10.0})
    assert not is_noisy({"other_cpu_seconds": 0.4, "seconds": 10.0})
