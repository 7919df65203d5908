"""What durability costs: tokens per second of the engine's loop with and without publishing, 64 running.

The real loop steps one batch. For a few steps its publisher stores all that comes out, in a real Redis that
is started as `tokenmill serve` starts it, and leases are renewed; for the next few what comes out is kept
back, and stored before the clock runs again. So the two ways take turns every few seconds over the same
sequences, and whatever else the machine does falls on both. The first step of each turn is not counted: what
it computes is stored while the next one runs, as in a service that never pauses.

The default model is the one that the promise is about; a model of two tiny layers shows what is left when
the forward pass costs nothing. Writes `benchmarks/results/durability.json`. `CACHE_DIR` keeps the converted
model.

    OMP_NUM_THREADS=1 python -m benchmarks.durability CACHE_DIR
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import redis
import torch
from prometheus_client import CollectorRegistry

from engine.engine import Engine, WaitingSequence
from engine.execution.build import Execution, build_execution
from engine.execution.default_model import DEFAULT_MODEL
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams
from monitoring.worker import WorkerMetrics
from tests.tiny_models import save_model
from tokenmill import embedded_redis
from worker.connections import connect
from worker.inbox import Arrival, Inbox
from worker.leases import Leases
from worker.loop import Loop
from worker.ownership import Holdings, Ownership
from worker.protocol import naming
from worker.protocol.messages import TaskError
from worker.protocol.records import Submission
from worker.protocol.store import TaskStore
from worker.protocol.time_limits import TimeLimits
from worker.publisher import Publisher
from worker.service import Service
from worker.settings import Timing
from worker.stream import Stream
from worker.watching import Observers, Pulse

RESULTS = Path(__file__).parent / "results" / "durability.json"
RUNNING, PROMPT_TOKENS, MAX_MODEL_LEN = 64, 32, 512
SLUG, TENANT = "benchmark", "default"
TIMING = Timing()
DRAIN_SECONDS = 0.001


class Tap:
    """The loop's outlet: hands on to the publisher at once, or, while `is_shut`, keeps what it is given."""

    def __init__(self, publisher: Publisher) -> None:
        self.is_shut = False
        self._publisher = publisher
        self._kept: list[StepOutput] = []

    @property
    def is_full(self) -> bool:
        return self._publisher.is_full

    def hand(self, output: StepOutput) -> None:
        if self.is_shut:
            self._kept.append(output)
        else:
            self._publisher.hand(output)

    def open(self) -> None:
        """Hand on all that was kept."""
        self.is_shut = False
        while self._kept:
            self._publisher.hand(self._kept.pop(0))

    def tell_waiting(self, line: list[WaitingSequence]) -> None:
        self._publisher.tell_waiting(line)

    def fail(self, request_id: str, error: TaskError) -> None:
        raise AssertionError(f"{request_id}: {error.message}")

    def wait_for_room(self, seconds: float) -> None:
        self._publisher.wait_for_room(seconds)


class Worker:
    """A worker's loop, publisher and leases; `RUNNING` tasks have been claimed and wait to be started."""

    def __init__(self, execution: Execution, url: str) -> None:
        self.storing_seconds = 0.0
        self._holdings = Holdings(threading.Event())
        self._metrics = WorkerMetrics(CollectorRegistry(), model=SLUG)
        self._pulse = Pulse(1e6, time.monotonic, on_tick=lambda: None, arm=lambda _: None)
        store = TaskStore(connect(url, "publisher"))
        self.publisher = Publisher(
            store, self._holdings, self._metrics, on_lost=self._fail, on_cancelled=self._fail
        )
        self.tap = Tap(self.publisher)
        inbox = Inbox()
        self._claim(store, execution, inbox)
        self.loop = Loop(
            _engine(execution),
            inbox,
            self.tap,
            self._holdings,
            observers=Observers((), lambda: None),
            pulse=self._pulse,
            clock=time.monotonic,
            wake=threading.Event(),
        )
        self._services = [
            self._service("publisher", self._publish),
            self._service("leases", self._leases(connect(url, "leases")).turn),
        ]

    def start(self) -> None:
        for service in self._services:
            service.start()

    def stop(self) -> None:
        for service in self._services:
            service.stop()
            service.join(10)

    def drain(self) -> None:
        while not self.publisher.is_drained or self.publisher.backlog:
            time.sleep(DRAIN_SECONDS)

    def _publish(self) -> None:
        began = time.thread_time()
        self.publisher.turn()
        self.storing_seconds += time.thread_time() - began

    def _claim(self, store: TaskStore, execution: Execution, inbox: Inbox) -> None:
        for _ in range(RUNNING):
            store.submit(_submission())
        claimed = store.claim(SLUG, worker=SLUG, max_tasks=RUNNING, lease_seconds=TIMING.lease_seconds)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS)
        for number, task in enumerate(claimed):
            ownership = Ownership(task.task_id, task.owner)
            prompt = [
                5 + (number * PROMPT_TOKENS + at) * 37 % (execution.vocab_size - 5)
                for at in range(PROMPT_TOKENS)
            ]
            self._holdings.take(ownership)
            self.publisher.open(Stream(ownership, num_prompt_tokens=len(prompt)))
            inbox.put(
                Arrival(
                    ownership=ownership,
                    prompt_token_ids=prompt,
                    params=params,
                    accepted_at=task.accepted_at,
                )
            )

    def _leases(self, client: Any) -> Leases:
        return Leases(
            TaskStore(client),
            self._holdings,
            self._pulse,
            self._metrics,
            slug=SLUG,
            lease_seconds=TIMING.lease_seconds,
            max_task_seconds=TIMING.max_task_seconds,
            announce=lambda: None,
            on_lost=self._fail,
            on_cancelled=self._fail,
            clock=time.monotonic,
            wait=time.sleep,
        )

    def _service(self, name: str, turn: Callable[[], None]) -> Service:
        return Service(name, turn, on_redis_error=self._fail, on_failure=self._fail)

    def _fail(self, *what: object) -> None:
        raise AssertionError(f"the measurement was disturbed: {what}")


def _engine(execution: Execution) -> Engine:
    return Engine(
        execution.config,
        execution.runner,
        execution.sampler,
        execution.tokenizer,
        # Nobody ends before the measurement does.
        eos_token_ids=frozenset(),
        vocab_size=execution.vocab_size,
    )


def _submission() -> Submission:
    queue = naming.queue_name(SLUG, naming.DEFAULT_PRIORITY, TENANT)
    return Submission(
        task_id=naming.new_task_id(),
        queue=queue,
        slug=SLUG,
        model=SLUG,
        priority=naming.DEFAULT_PRIORITY,
        tenant=TENANT,
        job_fields={"status": "queued", "data": b"", "origin": queue},
        cost=1,
        num_outputs=1,
        limits=TimeLimits(),
    )


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a server as `tokenmill serve` starts it, empty, on this machine's disk."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-durability-") as name:
        directory, port = Path(name), embedded_redis.free_port()
        spec = embedded_redis.server_spec(directory, directory / "log", port)
        server = subprocess.Popen(spec.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = embedded_redis.local_url(port)
        try:
            embedded_redis.wait_until_ready(url, directory / "log", lambda: server.poll() is None, time.sleep)
            yield url
        finally:
            server.kill()
            server.wait()


def measure(execution: Execution, url: str, num_turns: int, num_steps: int) -> dict[str, Any]:
    """`num_turns` of each way, of `num_steps` counted steps each."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
        worker = Worker(execution, url)
        worker.start()
        while worker.loop.load.num_running < RUNNING or worker.loop.load.num_waiting:
            worker.loop.turn()
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        redis_seconds = 0.0
        worker.drain()
        worker.storing_seconds = 0.0
        for number in range(num_turns):
            # The first of a pair is now the one, now the other.
            for way in sorted(seconds, reverse=bool(number % 2)):
                worker.tap.is_shut = way == "without"
                before = _processor_seconds(client)
                seconds[way].append(_step_seconds(worker, num_steps))
                worker.tap.open()
                worker.drain()
                redis_seconds += _processor_seconds(client) - before if way == "with" else 0.0
        worker.stop()
    num_stored = 2 * num_turns * (num_steps + 1) * RUNNING
    return {
        "running": RUNNING,
        "turns": num_turns,
        "steps_a_turn": num_steps,
        "step_ms": {way: _summary([1000 * one for one in values]) for way, values in seconds.items()},
        "tokens_per_second": {
            way: _summary([RUNNING / one for one in values]) for way, values in seconds.items()
        },
        "cost_percent": _summary(
            [
                100 * (1 - without / with_)
                for without, with_ in zip(seconds["without"], seconds["with"], strict=True)
            ]
        ),
        "publisher_us_per_token": round(1e6 * worker.storing_seconds / num_stored, 1),
        "redis_us_per_token": round(1e6 * redis_seconds / (num_stored / 2), 1),
    }


def _step_seconds(worker: Worker, num_steps: int) -> float:
    """Of one step, on the mean over `num_steps` after a first one."""
    worker.loop.turn()
    began = time.perf_counter()
    for _ in range(num_steps):
        worker.loop.turn()
    return (time.perf_counter() - began) / num_steps


def _processor_seconds(client: Any) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 2),
        "least": round(min(values), 2),
        "most": round(max(values), 2),
    }


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
    parser = argparse.ArgumentParser(description="What durability costs the engine's loop.")
    parser.add_argument("cache_dir", type=Path)
    parser.add_argument("--turns", type=int, default=8, help="of each way")
    parser.add_argument("--steps", type=int, default=10, help="counted in one turn")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    cases: dict[str, Any] = {}
    with redis_server() as url, tempfile.TemporaryDirectory() as directory:
        tiny = str(save_model(Path(directory) / "tiny"))
        for name, model, num_steps in (
            ("tiny", tiny, 2 * args.steps),
            (DEFAULT_MODEL, DEFAULT_MODEL, args.steps),
        ):
            cases[name] = measure(build(model, args.cache_dir), url, args.turns, num_steps)
            print(name, json.dumps(cases[name], indent=1), flush=True)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    args.json.parent.mkdir(exist_ok=True)
    measured = {"machine": machine, "appendfsync": "always", "cases": cases}
    args.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
