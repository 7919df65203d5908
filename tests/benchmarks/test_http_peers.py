"""The comparison over HTTP: servers are started, measured, ended; the table has medians and ratios."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.http_peers import FIGURES, measure, parse, report, server_specs
from benchmarks.http_servers import ServerFailed, ServerSpec, is_alive, running
from benchmarks.serving.environments import ROOT
from tests.benchmarks.http_server import CPU_SECONDS
from tests.conftest import free_port
from tests.tiny_models import save_model

ARGUMENTS = parse(["--clients", "4", "--requests", "10", "--input-len", "4", "--output-len", "2"])


def fake(*words: str) -> ServerSpec:
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.http_server", str(port), *words]
    return ServerSpec(name="fake", title="fake", command=command, port=port, ready="/ready")


def test_a_server_is_measured_with_its_processor_time_and_ended(tmp_path: Path) -> None:
    run = measure(fake(), ARGUMENTS, 0, tmp_path)
    assert (run["requests"]["completed"], run["tokens"]["output"], run["model"]) == (10, 20, "model")
    # The warm-up of four requests is not part of it.
    assert 10 * CPU_SECONDS * 0.9 <= run["server_cpu_seconds"] <= run["seconds"] + 0.1
    assert run["server_cpu_seconds_per_token"] == run["server_cpu_seconds"] / 20
    assert "per_request" not in run
    child = int((tmp_path / "http-fake.log").read_text().split()[0])
    assert not is_alive(child)
    assert str(ROOT) not in json.dumps(run)


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"ended with 1: \.\.\. no memory left"),
        running(fake("dies"), tmp_path / "log"),
    ):
        pass


def run_of(server: str, round_number: int, speed: float, others: float = 0.0) -> dict[str, Any]:
    spread = {"p50": 0.1, "p99": 0.2}
    return {
        "server": server, "round": round_number, "seconds": 10.0, "other_cpu_seconds": others,
        "server_cpu_seconds": 8.0, "server_cpu_seconds_per_token": 0.004,
        "per_second": {"output_tokens": speed}, "ttft_seconds": spread, "inter_token_seconds": spread,
        "end_to_end_seconds": spread, "generator": {"cpu_seconds": 0.5},
    }  # fmt: skip


def test_ratios_are_taken_within_rounds() -> None:
    runs = [
        run_of("tokenmill", 0, 300), run_of("vllm", 0, 400), run_of("vllm", 1, 200, others=5.0),
        run_of("tokenmill", 1, 250), run_of("tokenmill", 2, 330),
        run_of("vllm", 2, 300), run_of("vllm", 3, 9),
    ]  # fmt: skip
    machine = {"cpu": "a processor", "cores": 2, "flags": ["avx2"], "commit": "abc"}
    limits = {"threads": 2, "dtype": "float32"}
    text = report(
        {"machine": machine, "limits": limits, "load": ["--seed", "0"], "begun": "now", "runs": runs}
    )
    assert "| output tokens/s | 300 (250 to 330) | 300 (200 to 400) | 1.10 (0.75 to 1.25) |" in text
    assert "In 1 of 7 runs" in text
    assert all(name in text for name in FIGURES)


def test_both_servers_have_the_same_limits(tmp_path: Path) -> None:
    ours, theirs = server_specs(ARGUMENTS.limits, save_model(tmp_path / "model"), tmp_path, tmp_path)
    words = " ".join(theirs.command)
    assert ours.variables["TOKENMILL_MAX_NUM_SEQS"] == "4"
    assert "--max-num-seqs 4" in words
    assert ours.variables["TOKENMILL_MAX_MODEL_LEN"] == "2048"
    assert "--max-model-len 2048" in words
    assert ours.variables["OMP_NUM_THREADS"] == theirs.variables["OMP_NUM_THREADS"] == "2"
    # Keys and values of 32,768 tokens in float32, which is as many blocks of 16.
    kv_bytes = int(theirs.command[theirs.command.index("--kv-cache-memory-bytes") + 1])
    assert ours.variables["TOKENMILL_NUM_KV_BLOCKS"] == str(32768 // 16)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    layer = config["num_key_value_heads"] * config["head_dim"] * 2 * 4
    assert kv_bytes == 32768 * config["num_hidden_layers"] * layer
