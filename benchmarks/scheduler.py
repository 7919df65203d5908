"""The cost of the scheduler in microseconds per step and per running sequence.

A step is `schedule()` and `update()` in the steady state: all running sequences decode, and none starts or
ends. Their blocks fill up, are hashed and published. Other sequences wait for a slot, or, with slots free,
for blocks; in the second case each step tries to admit one. Times are processor time. Other load on the
machine still affects them: compare the first deciles then.

    python benchmarks/scheduler.py
"""

import argparse
import datetime
import itertools
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # Run from anywhere, as a file.

from engine.config import EngineConfig
from engine.outputs import SampledToken
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
PROMPT_LEN = 64
BLOCK_SIZE = 16
NUM_STEPS = 32  # In one repeat: each sequence fills two blocks.
TOKEN = SampledToken(7)


def build(num_running: int, num_waiting: int, num_steps: int, short_of: str) -> Scheduler:
    """`num_running` sequences that decode for `num_steps`, and others that wait for slots or blocks."""
    num_tokens = PROMPT_LEN + num_steps + 1
    config = EngineConfig(
        max_model_len=10_000,
        num_kv_blocks=num_running * -(-num_tokens // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=2 * num_running * PROMPT_LEN,
        max_num_seqs=num_running + (16 if short_of == "blocks" else 0),
        max_num_prefill_seqs=num_running,
        # Pinned sequences hold all their blocks from the start.
        max_preemptions=0 if short_of == "blocks" else 3,
    )
    scheduler = Scheduler(config)
    numbers = itertools.count()

    def add(count: int) -> None:
        for number in itertools.islice(numbers, count):
            scheduler.add_sequence(
                Sequence(
                    f"r{number}",
                    [number, *range(1, PROMPT_LEN)],
                    SamplingParams(max_tokens=num_steps + 1),
                    arrival_time=float(number),
                )
            )

    add(num_running)
    step(scheduler)
    assert len(scheduler.running_queue) == num_running
    add(num_waiting)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Run one step. Returns the processor time of the scheduler in seconds."""
    started = time.thread_time()
    outputs = scheduler.schedule()
    scheduled = time.thread_time()
    tokens = dict.fromkeys((item.sequence for item in outputs.scheduled), TOKEN)
    sampled = time.thread_time()
    scheduler.update(outputs, tokens, {})
    return time.thread_time() - sampled + scheduled - started


def measure(scheduler: Scheduler, num_repeats: int) -> dict[str, float]:
    """Microseconds per step: median, first and last decile of the means of the repeats."""
    num_running = len(scheduler.running_queue)
    means = [statistics.fmean(step(scheduler) for _ in range(NUM_STEPS)) * 1e6 for _ in range(num_repeats)]
    assert len(scheduler.running_queue) == num_running, "not a steady state"
    deciles = statistics.quantiles(means, n=10)
    step_us = {"p10": deciles[0], "median": statistics.median(means), "p90": deciles[-1]}
    per_sequence_us = {f"{name}_per_sequence": value / num_running for name, value in step_us.items()}
    return {name: round(value, 3) for name, value in (step_us | per_sequence_us).items()}


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the scheduler per step.")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100_000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file to write the results to")
    args = parser.parse_args()
    rows = []
    print(f"{'running':>8}{'waiting':>9}{'short of':>10}{'us a step':>11}   us per running sequence")
    for num_running, num_waiting in itertools.product(args.running, args.waiting):
        for short_of in ("slots", "blocks") if num_waiting else ("slots",):
            scheduler = build(num_running, num_waiting, args.repeats * NUM_STEPS, short_of)
            figures = measure(scheduler, args.repeats)
            rows.append({"running": num_running, "waiting": num_waiting, "short_of": short_of, **figures})
            print(
                f"{num_running:>8}{num_waiting:>9}{short_of:>10}{figures['median']:>11.1f}   "
                f"{figures['median_per_sequence']:.2f} "
                f"({figures['p10_per_sequence']:.2f} to {figures['p90_per_sequence']:.2f})"
            )
    args.json.parent.mkdir(exist_ok=True)
    measured = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": cpu(),
        "unit": "microseconds of processor time of schedule() and update() per step",
        "rows": rows,
    }
    args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
