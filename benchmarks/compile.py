"""A decode step with compiled layers and without, what compiling costs, and after how many steps it pays.

    python -m benchmarks.compile [--model M] [--rows 1 64] [--steps 40] [--threads 2] [--cache .tokenmill]
        [--json FILE]

Both ways take turns in every step, so that a busy machine slows them alike; medians of seconds on the clock.
Run it twice for the seconds of a second start: what was compiled stays in the cache.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from engine.engine import Engine
from engine.execution.build import DEFAULT_MODEL, Execution, build_execution
from engine.sampling_params import SamplingParams


def load(args: argparse.Namespace, is_compiled: bool) -> tuple[Execution, float]:
    """The model, and the seconds that compiling took: from its own line to the next."""
    told: list[tuple[str, float]] = []
    execution = build_execution(
        args.model,
        cache_dir=args.cache,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=max(args.rows),
        num_kv_blocks=40 * max(args.rows),
        compile=is_compiled,
        progress=lambda line: told.append((line, time.perf_counter())),
    )
    times = [at for line, at in told if line.startswith(("compiling the model's layers", "compiled"))]
    if is_compiled and len(times) != 2:
        raise SystemExit("the model could not be compiled")
    return execution, times[1] - times[0] if is_compiled else 0.0


def decoding(execution: Execution, num_rows: int, steps: int) -> Engine:
    """An engine whose next `steps` steps decode that many sequences."""
    engine = execution.new_engine()
    chance = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + num_rows + 50, ignore_eos=True)
    for index in range(num_rows):
        prompt = [chance.randrange(5, execution.vocab_size) for _ in range(chance.randrange(50, 200))]
        engine.add(f"sequence {index}", prompt, params, arrival=float(index))
    told: set[str] = set()
    while len(told) < num_rows:
        told |= {output.request_id for output in engine.step().outputs}
    return engine


def median_steps(executions: list[Execution], num_rows: int, steps: int) -> list[float]:
    engines = [decoding(execution, num_rows, steps) for execution in executions]
    taken: list[list[float]] = [[] for _ in engines]
    for _ in range(steps):
        for engine, seconds in zip(engines, taken, strict=True):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
    return [statistics.median(seconds) for seconds in taken]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(".tokenmill"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (plain, _), (compiled, seconds) = load(args, False), load(args, True)
    print(f"compiling took {seconds:.1f} s")
    found = []
    for num_rows in args.rows:
        without, with_it = median_steps([plain, compiled], num_rows, args.steps)
        pays = round(seconds / (without - with_it)) if with_it < without else None
        said = "never pays" if pays is None else f"pays after {pays} steps"
        print(f"{num_rows} rows | plain {without * 1e3:.1f} ms | compiled {with_it * 1e3:.1f} ms | {said}")
        found.append({"rows": num_rows, "plain": without, "compiled": with_it, "pays_after_steps": pays})
    if args.json:
        about = {
            "model": str(args.model),
            "dtype": plain.dtype,
            "threads": args.threads,
            "torch": torch.__version__,
        }
        args.json.write_text(
            json.dumps({**about, "compile_seconds": seconds, "steps": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
