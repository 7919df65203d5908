"""The cost of durability: tokens per second of the engine's loop with and without publishing, 64 running.

The loop of a worker steps one batch. For a few steps its publisher stores the outputs in a Redis that is
configured as by `tokenmill serve`, and leases are renewed. For the next few steps the outputs are kept, and
stored before the clock starts again. The two modes alternate every few seconds over the same sequences, so
that other load on the machine affects both. The first step of each turn does not count, since its outputs
are stored while the next step runs, as in a service that never pauses.

The documented figure is that of the default model. A model of two tiny layers shows the cost without the
forward pass. Writes `benchmarks/results/durability.json`. `CACHE_DIR` keeps the converted model.

    OMP_NUM_THREADS=1 python -m benchmarks.durability CACHE_DIR
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import redis
import torch

from benchmarks.tapped_worker import TappedWorker
from engine.execution.build import Execution, build_execution
from engine.execution.loading.default_model import DEFAULT_MODEL
from tests.tiny_models import save_model
from tokenmill.serve import embedded_redis

RESULTS = Path(__file__).parent / "results" / "durability.json"
RUNNING, PROMPT_TOKENS, MAX_MODEL_LEN = 64, 32, 512
WITHOUT, WITH = MODES = ("without", "with")


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of an empty server, configured as by `tokenmill serve`, on the local disk."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-durability-") as name:
        directory = Path(name)
        log, socket_file = directory / "log", embedded_redis.socket_path(directory)
        spec = embedded_redis.server_spec(directory, log, socket_file)
        server = subprocess.Popen(spec.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = embedded_redis.socket_url(socket_file)
        try:
            embedded_redis.wait_until_ready(url, log, lambda: server.poll() is None, time.sleep)
            yield url
        finally:
            server.kill()
            server.wait()


def measure(execution: Execution, url: str, num_turns: int, num_steps: int) -> dict[str, Any]:
    """Measure `num_turns` turns of each mode, with `num_steps` counted steps each."""
    step_seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    redis_seconds = 0.0
    with redis.Redis.from_url(url) as client:
        client.flushall()
        worker = begin(execution, url)
        for number in range(num_turns):
            # The mode that comes first alternates.
            for mode in MODES[:: -1 if number % 2 else 1]:
                worker.tap.is_shut = mode == WITHOUT
                before = cpu_seconds(client)
                step_seconds[mode].append(take_steps(worker, num_steps))
                worker.tap.open()
                worker.drain()
                redis_seconds += cpu_seconds(client) - before if mode == WITH else 0.0
        worker.stop()
    num_tokens = num_turns * (num_steps + 1) * RUNNING
    pairs = zip(step_seconds[WITHOUT], step_seconds[WITH], strict=True)
    return {
        "running": RUNNING,
        "turns": num_turns,
        "steps_a_turn": num_steps,
        "step_ms": {mode: summary([1000 * one for one in step_seconds[mode]]) for mode in MODES},
        "tokens_per_second": {mode: summary([RUNNING / one for one in step_seconds[mode]]) for mode in MODES},
        "cost_percent": summary([100 * (1 - without / with_) for without, with_ in pairs]),
        "publisher_us_per_token": round(1e6 * worker.storing_seconds / (2 * num_tokens), 1),
        "redis_us_per_token": round(1e6 * redis_seconds / num_tokens, 1),
    }


def begin(execution: Execution, url: str) -> TappedWorker:
    """A worker in which all tasks run and the results of their prefill are stored."""
    worker = TappedWorker(
        execution,
        url,
        num_tasks=RUNNING,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS,
    )
    worker.start()
    while worker.loop.load.num_running < RUNNING or worker.loop.load.num_waiting:
        worker.loop.turn()
    worker.drain()
    worker.storing_seconds = 0.0
    return worker


def take_steps(worker: TappedWorker, num_steps: int) -> float:
    """Mean seconds of a step over `num_steps` steps, after one that does not count."""
    worker.loop.turn()
    began = time.perf_counter()
    for _ in range(num_steps):
        worker.loop.turn()
    return (time.perf_counter() - began) / num_steps


def cpu_seconds(client: Any) -> float:
    """CPU time of the Redis server so far."""
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def summary(values: list[float]) -> dict[str, float]:
    named = {"median": median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in named.items()}


def build(model: str, cache_dir: Path) -> Execution:
    return build_execution(
        model,
        cache_dir=cache_dir,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=RUNNING * MAX_MODEL_LEN // 16,
        max_num_seqs=RUNNING,
        max_num_prefill_seqs=RUNNING,
        prefix_caching=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of durability for the engine's loop.")
    parser.add_argument("cache_dir", type=Path)
    parser.add_argument("--turns", type=int, default=8, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=10, help="steps counted in one turn")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    cases: dict[str, Any] = {}
    with redis_server() as url, tempfile.TemporaryDirectory() as directory:
        for name, model in (
            ("tiny", str(save_model(Path(directory) / "tiny"))),
            (DEFAULT_MODEL, DEFAULT_MODEL),
        ):
            cases[name] = measure(build(model, args.cache_dir), url, args.turns, args.steps)
            print(name, json.dumps(cases[name], indent=1), flush=True)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    measured = {"machine": machine, "appendfsync": "always", "cases": cases}
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
