"""What deterministic mode costs: tokens per second with it on and off, on the default model.

Both engines take turns in one process, so that other load affects both. Reports the median and the range of
the turns, in CPU seconds of one thread. Writes `benchmarks/results/determinism.json`. `CACHE_DIR` holds the
converted model.

    OMP_NUM_THREADS=1 python -m benchmarks.determinism CACHE_DIR
"""

import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.execution.build import Execution, build_execution
from engine.execution.loading.default_model import DEFAULT_MODEL
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "determinism.json"
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
RUNNING = (1, 16)
TURNS = 3


def main() -> None:
    cache_dir = Path(sys.argv[1])
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        for case in measure(cache_dir, dtype):
            print(case, flush=True)
            cases.append(case)
            write(cases)


def write(cases: list[dict[str, Any]]) -> None:
    """Write the cases measured so far, so that a stopped run leaves results."""
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    shape = {"model": DEFAULT_MODEL, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"machine": machine, **shape, "turns": TURNS, "cases": cases}, indent=2) + "\n"
    )


def measure(cache_dir: Path, dtype: str) -> Iterator[dict[str, Any]]:
    """One case for each number of running sequences."""
    executions: dict[str, Execution] = {}
    load_seconds: dict[str, float] = {}
    for name, deterministic in (("off", False), ("on", True)):
        begun = time.process_time()
        executions[name] = build_execution(
            DEFAULT_MODEL,
            cache_dir=cache_dir,
            dtype=dtype,
            device="cpu",
            deterministic=deterministic,
            num_kv_blocks=256,
            max_model_len=256,
            prefix_caching=False,
        )
        load_seconds[name] = round(time.process_time() - begun, 1)
    for running in RUNNING:
        rates: dict[str, list[float]] = {name: [] for name in executions}
        for _ in range(TURNS):
            for name, execution in executions.items():
                rates[name].append(running * OUTPUT_TOKENS / seconds(execution, running))
        yield {
            "dtype": dtype,
            "running": running,
            "load_seconds": load_seconds,
            "tokens_per_second": {name: summary(values) for name, values in rates.items()},
            "times_slower": round(median(rates["off"]) / median(rates["on"]), 2),
        }


def seconds(execution: Execution, running: int) -> float:
    """From the first step to the last token of `running` sequences that begin together."""
    engine = replace(execution, eos_token_ids=frozenset()).new_engine()
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    for number in range(running):
        prompt = [100 + (number * PROMPT_TOKENS + at) * 37 % 20000 for at in range(PROMPT_TOKENS)]
        engine.add(EngineRequest(str(number), prompt, params, arrival_time=float(number)))
    begun = time.process_time()
    while engine.has_work:
        engine.step()
    return time.process_time() - begun


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 2),
        "least": round(min(values), 2),
        "most": round(max(values), 2),
    }


if __name__ == "__main__":
    main()
