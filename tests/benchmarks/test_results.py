"""What is planned, kept, judged and shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.plan import (
    SMALL,
    SMOLLM2,
    VLLM,
    Cell,
    Filter,
    all_cells,
    groups,
    reason_against,
    repeats_of,
    target_cells,
)
from benchmarks.serving.record import Record
from benchmarks.serving.report import report, table
from benchmarks.serving.session import fits, in_turns, is_noisy
from benchmarks.serving.shapes import Shape
from benchmarks.serving.systems import OURS, REFERENCE, SYSTEMS
from benchmarks.serving.targets import RATIOS, Verdict, verdicts

OUR_CELL = Cell(SMOLLM2, "float32", "mixed", OURS)
FACTS = {
    "begun": "today",
    "machine": {"cpu": "a", "cores": 2, "flags": ["avx2"], "memory_bytes": 2**34, "commit": "abc"},
    "limits": {"threads": 2, "token_budget": 512, "max_seqs": 64},
}


def figures(tokens_per_second: float, **more: Any) -> dict[str, Any]:
    percentiles = {"p50": 0.1, "p90": 0.15, "p99": 0.19}
    return {
        "seconds": 100 / tokens_per_second,
        "output_tokens": 100,
        "tokens_per_second": tokens_per_second,
        "requests_per_second": 1.0,
        "first_token_seconds": percentiles,
        "inter_token_seconds": percentiles,
        "cpu_seconds": 1.0,
        "other_cpu_seconds": 0.0,
        "peak_bytes": 2**20,
        **more,
    }


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "results.json", FACTS)


def of(found: list[Verdict], title: str, workload: str = "mixed") -> Verdict:
    return next(one for one in found if one.title == title and one.workload == workload)


def test_every_target_has_its_cells_in_the_plan_of_the_targets() -> None:
    cells = set(target_cells())
    for ratio in RATIOS:
        for model in {SMOLLM2, SMALL} & set(ratio.models):
            for dtype in ratio.dtypes:
                for workload in ratio.workloads:
                    for system in (OURS, *ratio.systems):
                        assert Cell(model, dtype, workload, system) in cells


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
    assert repeats_of(REFERENCE, 3) == 1
    assert repeats_of(OURS, 3) == 3


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


def test_a_record_is_read_again_where_it_was_stopped(tmp_path: Path, record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add_failure(OUR_CELL._replace(system="vllm-eager"), "gone")
    again = Record(tmp_path / "results.json", {})
    assert again.has(OUR_CELL, 0)
    assert not again.has(OUR_CELL, 1)
    assert again.failures == {OUR_CELL._replace(system="vllm-eager"): "gone"}
    assert json.loads((tmp_path / "results.json").read_text())["machine"] == FACTS["machine"]


def test_a_run_takes_back_an_earlier_failure(record: Record) -> None:
    record.add_failure(OUR_CELL, "once")
    record.add_run(OUR_CELL, 0, figures(10.0))
    assert record.failures == {}


def test_of_two_modes_the_better_one_counts_and_medians_are_compared(record: Record) -> None:
    for repeat, speed in enumerate((9.0, 20.0, 100.0)):
        record.add_run(OUR_CELL, repeat, figures(speed))
    record.add_run(OUR_CELL._replace(system=VLLM[0]), 0, figures(8.0))
    record.add_run(OUR_CELL._replace(system=VLLM[1]), 0, figures(16.0))
    verdict = of(verdicts(record), "vLLM, its better mode")
    assert verdict.measured == 1.25
    assert verdict.is_met
    record.add_run(OUR_CELL._replace(system=REFERENCE), 0, figures(4.0))
    assert of(verdicts(record), "transformers, one by one").is_met is False


def test_what_was_not_measured_is_not_missed_and_says_why(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add_failure(OUR_CELL._replace(system="llama.cpp"), "it does not build")
    verdict = of(verdicts(record), "llama.cpp")
    assert (verdict.is_met, verdict.reason) == (None, "it does not build")
    assert of(verdicts(record), "llama.cpp", "one-stream").reason == "not part of this run"


def test_a_mode_that_failed_is_named_beside_the_ratio(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add_run(OUR_CELL._replace(system=VLLM[0]), 0, figures(5.0))
    record.add_failure(OUR_CELL._replace(system=VLLM[1]), "no compiler")
    assert VLLM[1] in of(verdicts(record), "vLLM, its better mode").reason


def test_distance_from_the_floor_and_the_tail(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add("floors", {"model": SMOLLM2, "dtype": "float32", "workload": "mixed", "seconds": 4.0})
    record.add_run(Cell(SMOLLM2, "float32", "long-and-chats", "tokenmill-short-chunks"), 0, figures(10.0))
    found = verdicts(record)
    assert of(found, "the floor").measured == 2.5
    assert of(found, "the floor").is_met is False
    assert of(found, "inter-token p99 / p50, own chunk cap", "long-and-chats").is_met


def test_the_table_names_everybody_who_was_asked(record: Record) -> None:
    record.add_run(
        OUR_CELL,
        0,
        figures(10.0, agreement={"requests": 7, "of_requests": 8, "tokens": 90, "of_tokens": 100}),
    )
    record.add_failure(OUR_CELL._replace(system="llama.cpp"), "it does not build | at all")
    text = report(record)
    assert f"| {SYSTEMS[OURS].title} | 10.0 (10.0 to 10.0) |" in text
    assert "7 of 8, 90%" in text
    assert "none: it does not build \\| at all" in text
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    heads = [row for row in rows if row.startswith("| engine | tokens/s")]
    assert all(row.count("|") == heads[0].count("|") for row in rows if row.startswith("| llama.cpp"))


def test_a_markdown_table() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
