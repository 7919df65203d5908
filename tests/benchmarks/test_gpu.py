"""The script for a GPU machine, run here in its small form, and what becomes of parts that misbehave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import plan, results_path, shown
from benchmarks.gpu.parts import Options, Part, run_all, run_part
from tests.benchmarks import misbehaving

ROOT = Path(__file__).parents[2]
OPTIONS = Options(device="cpu", quick=True, cache="")


def test_the_whole_script_on_a_cpu(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--device", "cpu", "--quick", "--minutes", "20"]
    out = tmp_path / "results.json"
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "This runs on a CPU" in ran.stdout
    content = json.loads(out.read_text())
    assert (content["device"], content["quick"]) == ("cpu", True)
    parts = {part["part"]: part for part in content["parts"]}
    assert list(parts) == [part.name for part in plan("cpu", quick=True)]
    assert {part["status"] for part in parts.values()} <= {"ok", "absent"}
    for name in ("memory", "check torch", "check native", "time torch", "tokens torch"):
        assert parts[name]["status"] == "ok"
    for way in ("torch, graphs off", "transformers generate", "transformers continuous"):
        figures = parts[f"serve random-7m, {way}"]["figures"]
        assert (figures["requests"], figures["output_tokens"]) == (3, 24)
        assert figures["tokens_per_second"] > 0
    decode = parts["serve random-7m, torch, graphs off"]["figures"]["decode step of 2"]
    assert decode["bandwidth_share"] > 0
    for part in parts.values():
        assert part["status"] == "ok" or part["reason"]


def test_the_plan_for_a_gpu() -> None:
    names = [part.name for part in plan("cuda", quick=False)]
    assert len(set(names)) == len(names)
    assert "serve random-0.5b, triton, graphs on" in names
    assert "serve random-0.5b, triton, graphs off" in names
    assert "serve random-7m, torch, graphs on" not in names


def test_each_part_is_told_and_the_rest_runs_on() -> None:
    parts = [
        Part("broken", misbehaving.broken, (), 60),
        Part("absent", misbehaving.absent, (), 60),
        Part("killed", misbehaving.killed, (), 60),
        Part("leaving", misbehaving.leaving, (), 60),
        Part("fine", misbehaving.fine, (4,), 60),
        Part("rated", misbehaving.rated, (), 60),
        Part("rate", misbehaving.rate, (), 60),
    ]
    found = {one["part"]: one for one in run_all(parts, OPTIONS, time.monotonic() + 600)}
    assert [one["status"] for one in found.values()] == [
        "failed", "absent", "failed", "failed", "ok", "ok", "ok",
    ]  # fmt: skip
    assert "ValueError: no such kernel" in found["broken"]["reason"]
    assert found["absent"]["reason"] == "not on this machine"
    assert found["killed"]["reason"] == "its process ended with -9"
    assert "SystemExit: 3" in found["leaving"]["reason"]
    assert found["fine"]["figures"] == {"number": 4}
    assert found["rate"]["figures"] == {"rate": 5.0}


def test_a_part_that_does_not_end_is_ended() -> None:
    assert run_part(Part("endless", misbehaving.endless, (), 1), OPTIONS, 1.0) == {
        "status": "timeout",
        "reason": "it took more than 1 s",
    }


def test_what_has_no_time_left_is_skipped() -> None:
    (found,) = run_all([Part("fine", misbehaving.fine, (4,), 60)], OPTIONS, time.monotonic())
    assert (found["status"], found["reason"]) == ("skipped", "no time was left")


def test_where_the_results_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert results_path() == ROOT / "benchmarks" / "results" / "gpu.json"
    monkeypatch.setenv("OUT", str(tmp_path))
    assert results_path() == tmp_path / "gpu.json"
    monkeypatch.setenv("OUT", str(tmp_path / "mine.json"))
    assert results_path() == tmp_path / "mine.json"


def test_a_part_is_shown() -> None:
    failed = {"part": "a", "seconds": 1.0, "status": "failed", "reason": "Traceback\n  x\nValueError: y\n"}
    assert shown(failed) == "a (1.0 s): failed: ValueError: y"
    figures = {"speed": 3, "first_tokens": [[1]]}
    assert shown({"part": "b", "seconds": 2.0, "status": "ok", "figures": figures}) == (
        "b (2.0 s): ok\n  speed: 3"
    )
