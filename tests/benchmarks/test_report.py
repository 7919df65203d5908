"""What is judged and shown."""

from pathlib import Path

import pytest

from benchmarks.serving.extent import extent, shortfalls
from benchmarks.serving.plan import MEDIUM, REPEATS, SMALL, SMOLLM2, VLLM, Cell
from benchmarks.serving.record import Record
from benchmarks.serving.report import report, table
from benchmarks.serving.systems import OURS, REFERENCE, SYSTEMS, with_budget
from benchmarks.serving.targets import Verdict, verdicts
from tests.benchmarks.made_record import FACTS, OUR_CELL, figures

RATES = {
    "weights_bytes_per_second": 20e9,
    "memory_bytes_per_second": 10e9,
    "flops_per_second": 120e9,
}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.begin(tmp_path / "results.json", FACTS)


def of(found: list[Verdict], title: str, workload: str = "mixed") -> Verdict:
    return next(one for one in found if one.title == title and one.place.workload == workload)


def add_floor(record: Record, workload: str, seconds: float) -> None:
    place = {"model": SMOLLM2, "dtype": "float32", "workload": workload}
    record.add("floors", place | {"seconds": seconds} | RATES)


def rows(text: str, beginning: str) -> list[list[str]]:
    """The cells of the lines of a table that begin so."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(beginning)
    ]


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


def test_a_peer_counts_with_the_best_of_its_budgets(record: Record) -> None:
    """One that was measured with 512 tokens a step alone may be faster with others."""
    record.add_run(OUR_CELL, 0, figures(20.0))
    record.add_run(OUR_CELL._replace(system=VLLM[0]), 0, figures(8.0))
    record.add_run(OUR_CELL._replace(system=with_budget(VLLM[0], 2048)), 0, figures(16.0))
    assert of(verdicts(record), "vLLM, its better mode").measured == pytest.approx(1.25)


def test_what_was_not_measured_is_not_missed_and_says_why(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add_failure(OUR_CELL._replace(system="llama.cpp"), "it does not build")
    verdict = of(verdicts(record), "llama.cpp, its better mode")
    assert (verdict.is_met, verdict.reason) == (None, "it does not build")
    assert of(verdicts(record), "llama.cpp, its better mode", "one-stream").reason == "not part of this run"


def test_a_mode_that_failed_is_named_beside_the_ratio(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add_run(OUR_CELL._replace(system=VLLM[0]), 0, figures(5.0))
    record.add_failure(OUR_CELL._replace(system=VLLM[1]), "no compiler")
    assert VLLM[1] in of(verdicts(record), "vLLM, its better mode").reason


def test_distance_from_the_floor_and_the_tail(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    add_floor(record, "mixed", 4.0)
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
    (heads,) = rows(text, "| engine | tokens/s")
    (none,) = rows(text.replace("\\|", ""), f"| {SYSTEMS['llama.cpp'].title} | none")
    assert len(none) == len(heads)


def test_a_markdown_table() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_each_repeat_is_compared_with_the_other_engine_in_the_same_round(record: Record) -> None:
    for repeat, (ours, theirs) in enumerate([(12.0, 10.0), (30.0, 10.0), (20.0, 16.0)]):
        record.add_run(OUR_CELL, repeat, figures(ours))
        record.add_run(OUR_CELL._replace(system="transformers-continuous"), repeat, figures(theirs))
    # Measured once, so that round stands for all.
    record.add_run(OUR_CELL._replace(system=REFERENCE), 0, figures(4.0))
    found = verdicts(record)
    assert of(found, "transformers, continuous").measured == 2.0
    assert of(found, "transformers, continuous").each == (1.2, 3.0, 1.25)
    assert of(found, "transformers, one by one").each == (3.0, 7.5, 5.0)


def test_only_a_repeat_that_told_its_share_is_judged_by_it(record: Record) -> None:
    title = "share of a step outside of model and sampling"
    record.add_run(OUR_CELL, 0, figures(10.0))
    assert of(verdicts(record), title).is_met is None
    record.add_run(OUR_CELL, 1, figures(10.0, details={"host_share": 0.04}))
    assert of(verdicts(record), title).each == (0.04,)
    assert of(verdicts(record), title).is_met is False


def test_the_least_time_to_load_counts_and_only_of_the_default_model(record: Record) -> None:
    for model in (SMOLLM2, SMALL):
        record.add_run(OUR_CELL._replace(model=model), 0, figures(10.0))
        for seconds in (30.0, 9.0):
            load = {
                "model": model,
                "dtype": "float32",
                "system": OURS,
                "seconds": seconds,
                "cpu_seconds": 1.0,
            }
            record.add("loads", load)
    (found,) = [one for one in verdicts(record) if one.title == "seconds to load"]
    assert (found.place.model, found.measured, found.each, found.is_met) == (SMOLLM2, 9.0, (30.0, 9.0), True)


def test_the_table_of_targets_says_what_was_measured_how_often_and_with_which_end(record: Record) -> None:
    for repeat, ours in enumerate((12.0, 30.0, 20.0)):
        record.add_run(OUR_CELL, repeat, figures(ours))
        record.add_run(OUR_CELL._replace(system=VLLM[0]), repeat, figures(10.0))
    (found,) = [row for row in rows(report(record), "| vLLM, its better mode") if row[1] == "mixed"]
    assert found[2:] == [SMOLLM2, "float32", ">= 1.25", "2.00", "1.20 to 3.00", "3", "met"]


def test_every_engine_has_its_distance_from_the_floor_of_every_workload(record: Record) -> None:
    vllm, alone = OUR_CELL._replace(system=VLLM[0]), OUR_CELL._replace(workload="one-stream")
    for workload, seconds in (("mixed", 4.0), ("one-stream", 2.0)):
        add_floor(record, workload, seconds)
    for cell, speed in ((OUR_CELL, 10.0), (vllm, 5.0), (alone, 20.0)):
        record.add_run(cell, 0, figures(speed))
    text = report(record)
    (heads,) = rows(text, "| model | dtype | workload | reads")
    assert heads[-2:] == [OURS, VLLM[0]]
    found = {row[2]: row[3:] for row in rows(text, f"| {SMOLLM2} | float32 |") if len(row) == len(heads)}
    assert found == {
        "mixed": ["20.0 / 10.0", "120", "4.00", "2.5", "5.0"],
        "one-stream": ["20.0 / 10.0", "120", "2.00", "2.5", ""],
    }


def run_whole(record: Record, requests: int = 64) -> None:
    for repeat in range(REPEATS):
        record.add_run(OUR_CELL, repeat, figures(10.0, requests=requests))
    record.add_run(OUR_CELL._replace(system=REFERENCE), 0, figures(2.0, requests=requests))


def test_a_title_says_how_many_requests_were_served_how_often(record: Record) -> None:
    run_whole(record)
    assert "\n\n64 requests, 1 to 3 repeats\n\n" in report(record)
    assert "part of a whole run" not in report(record)


def test_a_part_of_a_whole_run_is_called_that(record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0, requests=24))
    text = report(record)
    assert "\n\n24 of 64 requests, 1 repeat\n\n" in text
    assert "mixed was served with 24 of its 64 requests." in text
    assert "1 of 1 cells have fewer repeats than the 3 of a whole run." in text
    assert "64 requests at once" not in text


@pytest.mark.parametrize(
    ("workload", "model", "whole"),
    [("one-stream", SMOLLM2, 1), ("long-and-chats", SMOLLM2, 32), ("mixed", MEDIUM, 32)],
)
def test_a_whole_workload_has_the_requests_of_its_kind_and_model(
    record: Record, workload: str, model: str, whole: int
) -> None:
    cell = OUR_CELL._replace(workload=workload, model=model)
    for repeat in range(REPEATS):
        record.add_run(cell, repeat, figures(10.0, requests=whole))
    assert shortfalls(record) == []
    assert extent(record, cell.place) == f"{whole} request{'s' * (whole > 1)}, 3 repeats"


def test_who_completed_a_file_stands_in_its_head(tmp_path: Path, record: Record) -> None:
    run_whole(record)
    machine = {**FACTS["machine"], "commit": "def"}
    again = Record.begin(tmp_path / "results.json", FACTS | {"begun": "tomorrow", "machine": machine})
    assert "begun today, commit abc; continued tomorrow, commit def." in report(again)
