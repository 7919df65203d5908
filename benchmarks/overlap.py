"""The benefit of asynchronous scheduling on a CPU: `python -m benchmarks.overlap`.

64 greedy requests of 16 prompt and 32 output tokens, all at once. Three modes take turns in one run, so that
other load affects each of them: synchronous steps; asynchronous steps that are computed where they are
launched; and asynchronous steps in another thread, which computes while this one schedules and detokenizes.
Writes `benchmarks/results/overlap.json`.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.make_model import make_model
from engine.execution.build import Execution, build_execution
from engine.execution.machine.async_copy import SampledIds
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.sampling.sampler import Sampler
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams

REQUESTS, PROMPT, OUTPUT = 64, 16, 32
RESULTS = Path(__file__).parent / "results" / "overlap.json"


class ThreadExecutor:
    """An executor for greedy requests on a CPU. `launch` reads all that it needs of the sequences."""

    def __init__(self, runner: ModelRunner, num_threads: int) -> None:
        self._runner = runner
        self._sampler = Sampler()
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(num_threads,))

    def can_launch(self, item: ScheduledSequence) -> bool:
        return item.sequence.params.is_greedy

    def launch(self, outputs: SchedulerOutputs, after: "Future[SampledIds] | None") -> "Future[SampledIds]":
        inputs = self._runner._inputs.build(outputs)

        def compute() -> SampledIds:
            drawn = None if after is None else after.result().tokens
            with torch.inference_mode():
                logits = self._runner.forward(replace(inputs, drawn=drawn))
            return self._sampler.draw(logits, outputs.scheduled)

        return self._thread.submit(compute)

    def fetch(self, launched: "Future[SampledIds]") -> list[SampledToken]:
        return self._sampler.fetch(launched.result())


def serve(execution: Execution) -> tuple[float, float, list[int]]:
    """Seconds, CPU seconds, and all tokens in order of requests."""
    engine = execution.new_engine()
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for number in range(REQUESTS):
        prompt = [3 + (number * 31 + at * 7) % 1000 for at in range(PROMPT)]
        engine.add(EngineRequest(f"{number:02}", prompt, params, arrival_time=number))
    tokens: dict[str, list[int]] = {}
    started, cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        for one in engine.step().outputs:
            if one.token_id is not None:
                tokens.setdefault(one.request_id, []).append(one.token_id)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return seconds, cpu, [token for name in sorted(tokens) for token in tokens[name]]


def measure(executions: dict[str, Execution], rounds: int) -> list[dict[str, Any]]:
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in executions}
    expected = None
    for turn in range(rounds + 1):
        for name, execution in executions.items():
            seconds, cpu, tokens = serve(execution)
            expected = expected or tokens
            if tokens != expected:
                raise SystemExit(f"{name}: other tokens than step by step")
            if turn:  # the first warms up
                figures[name].append((seconds, cpu))
    return [_case(name, found) for name, found in figures.items()]


def _case(name: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    rates = sorted(REQUESTS * OUTPUT / seconds for seconds, _ in found)
    return {
        "way": name,
        "tokens_per_second": round(statistics.median(rates)),
        "least": round(rates[0]),
        "most": round(rates[-1]),
        "cpu_seconds": round(statistics.median(cpu for _, cpu in found), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random-7m")
    parser.add_argument("--cache-dir", type=Path, default=Path(".tokenmill"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    execution = build_execution(
        str(make_model(args.model, args.cache_dir)),
        cache_dir=args.cache_dir,
        dtype="float32" if not torch.cuda.is_available() else "auto",
        max_model_len=PROMPT + OUTPUT,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=REQUESTS * PROMPT,
        async_scheduling=True,
    )
    executions = {"step by step": replace(execution, async_executor=None), "ahead": execution}
    if execution.device == "cpu":
        assert isinstance(execution.runner, ModelRunner)
        in_thread = ThreadExecutor(execution.runner, args.threads)
        executions["ahead, in a thread"] = replace(execution, async_executor=in_thread)
    cases = measure(executions, args.rounds)
    record = {
        "model": args.model,
        "device": execution.device,
        "attention": execution.attention,
        "threads": args.threads,
        "rounds": args.rounds,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cases": cases,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    json.dump(cases, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
