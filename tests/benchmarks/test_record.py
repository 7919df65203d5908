"""What a file of results keeps, and what may be added to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.record import OtherConditions, Record
from tests.benchmarks.made_record import FACTS, OUR_CELL, figures


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.begin(tmp_path / "results.json", FACTS)


def test_a_record_is_read_again_where_it_was_stopped(tmp_path: Path, record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    record.add_failure(OUR_CELL._replace(system="vllm-eager"), "gone")
    again = Record.read(tmp_path / "results.json")
    assert again.has(OUR_CELL, 0)
    assert not again.has(OUR_CELL, 1)
    assert again.failures == {OUR_CELL._replace(system="vllm-eager"): "gone"}
    assert json.loads((tmp_path / "results.json").read_text())["machine"] == FACTS["machine"]


def test_a_run_takes_back_an_earlier_failure(record: Record) -> None:
    record.add_failure(OUR_CELL, "once")
    record.add_run(OUR_CELL, 0, figures(10.0))
    assert record.failures == {}


def test_a_file_that_is_there_is_completed(tmp_path: Path, record: Record) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    later = {**FACTS, "begun": "tomorrow"}
    again = Record.begin(tmp_path / "results.json", later)
    again.add_run(OUR_CELL, 1, figures(12.0))
    read = Record.read(tmp_path / "results.json")
    assert [(run.cell, run.repeat) for run in read.runs] == [(OUR_CELL, 0), (OUR_CELL, 1)]
    assert (read.content["begun"], read.content["continued"]) == ("today", [later])


@pytest.mark.parametrize(
    "other",
    [
        {"limits": {**FACTS["limits"], "token_budget": 256}},
        {"machine": {**FACTS["machine"], "cores": 4}},
        {"machine": {**FACTS["machine"], "flags": ["avx512f"]}},
    ],
)
def test_what_was_measured_otherwise_is_not_completed(
    tmp_path: Path, record: Record, other: dict[str, Any]
) -> None:
    record.add_run(OUR_CELL, 0, figures(10.0))
    path = tmp_path / "results.json"
    before = path.read_bytes()
    with pytest.raises(OtherConditions):
        Record.begin(path, FACTS | other)
    assert path.read_bytes() == before


def test_another_commit_may_complete_a_file(tmp_path: Path, record: Record) -> None:
    record.save()
    Record.begin(tmp_path / "results.json", FACTS | {"machine": {**FACTS["machine"], "commit": "def"}})


def test_a_workload_has_one_number_of_requests_in_a_file(record: Record) -> None:
    place = OUR_CELL.place
    assert record.num_requests(place) is None
    record.check_requests(place, 8)
    record.add_run(OUR_CELL, 0, figures(7.3, requests=24))
    assert record.num_requests(place) == 24
    record.check_requests(place, 24)
    record.check_requests(place._replace(workload="one-stream"), 1)
    with pytest.raises(OtherConditions, match="mixed with 24 requests, not 64"):
        record.check_requests(place, 64)


def test_a_file_of_another_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"format": 0}')
    with pytest.raises(OtherConditions, match="format 0"):
        Record.read(path)
