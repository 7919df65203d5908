"""One command more with the same file of results: it measures what lacks, and nothing twice."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import __main__ as program
from benchmarks.serving.plan import SMOLLM2, Cell, Group
from benchmarks.serving.protocol import Settings
from benchmarks.serving.record import Record
from benchmarks.serving.references import References
from benchmarks.serving.systems import OURS, REFERENCE
from tests.benchmarks.fake_engines import SHAPE, FakeCrew, measure
from tests.benchmarks.made_record import FACTS, OUR_CELL, figures

GROUP = Group(SMOLLM2, "float32")
RATES = {"weights_bytes_per_second": 1e9, "memory_bytes_per_second": 1e9, "flops_per_second": 1e9}
SETTINGS = Settings(
    model="m",
    dtype="float32",
    threads=2,
    token_budget=64,
    max_seqs=4,
    max_model_len=512,
    kv_tokens=512,
    kv_bytes=1,
    scratch="s",
    options={},
)


def measured(record: Record, directory: Path, cells: list[Cell], repeats: int) -> list[tuple[str, ...]]:
    """Whom a session asked for what, but for the tokens to compare with."""
    engines = FakeCrew()
    measure(engines, record, cells, repeats, references=References(directory / "references"))
    return [one for one in engines.runs if one[0] != REFERENCE]


def test_a_session_measures_what_its_record_lacks(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    other = OUR_CELL._replace(workload="one-stream")
    first = Record.begin(path, FACTS)
    assert measured(first, tmp_path, [OUR_CELL], 1) == [(OURS, "mixed")]
    again = Record.begin(path, FACTS)
    assert measured(again, tmp_path, [OUR_CELL, other], 2) == [
        (OURS, "one-stream"),
        (OURS, "mixed"),
        (OURS, "one-stream"),
    ]
    assert measured(Record.begin(path, FACTS), tmp_path, [OUR_CELL, other], 2) == []


def test_a_workload_that_is_added_gets_its_floor_from_the_same_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run_module(module: str, *_: Any) -> str:
        asked.append(module)
        return json.dumps(RATES)

    monkeypatch.setattr(program, "run_module", run_module)
    record = Record.begin(tmp_path / "results.json", FACTS)
    for workloads in (["mixed"], ["mixed", "one-stream", "open-50"], ["mixed", "one-stream"]):
        program.record_floors(record, GROUP, SHAPE, SETTINGS, workloads, 2)
    assert [row["workload"] for row in record.content["floors"]] == ["mixed", "one-stream"]
    assert asked == ["benchmarks.serving.measure_machine"]


def run_main(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str, speed: float) -> int:
    """The command, with a group that has one more run of our cell for its measuring."""

    def measure_group(group: Group, cells: list[Cell], *rest: Any) -> None:
        record = next(one for one in rest if isinstance(one, Record))
        assert group == GROUP
        record.add_run(cells[0], len(record.runs), figures(speed, requests=24))

    monkeypatch.setattr(program, "measure_group", measure_group)
    monkeypatch.setattr(program, "plot", lambda *_: None)
    monkeypatch.setattr(program, "make", lambda *_: None)
    only = ["--model", SMOLLM2, "--dtype", "float32", "--workload", "mixed", "--system", OURS]
    monkeypatch.setattr(sys, "argv", ["serving", *only, "--out", str(path), *words])
    return program.main()


def test_the_command_completes_its_file_and_writes_the_table_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    assert run_main(monkeypatch, path, "--requests", "24", speed=10.0) == 0
    assert run_main(monkeypatch, path, "--requests", "24", speed=20.0) == 0
    assert [run.figures["tokens_per_second"] for run in Record.read(path).runs] == [10.0, 20.0]
    assert "24 of 64 requests, 2 repeats" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("words", [(), ("--requests", "8"), ("--requests", "24", "--threads", "1")])
def test_the_command_leaves_a_file_alone_that_was_measured_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    path = tmp_path / "results.json"
    run_main(monkeypatch, path, "--requests", "24", speed=10.0)
    before = path.read_bytes()
    assert run_main(monkeypatch, path, *words, speed=20.0) == 2
    assert path.read_bytes() == before
    assert "choose another --out" in capsys.readouterr().err
