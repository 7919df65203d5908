"""The benchmarks of `benchmarks/gpu.sh`: their order, and where the results go.

    python -m benchmarks.gpu [--device cpu --quick] [--minutes M] [--only PREFIX ...]

The result file is complete after every part and contains the status of each.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu import attention, serving
from benchmarks.gpu.parts import Options, Part, preload, run_all
from benchmarks.gpu.timing import memory
from benchmarks.serving.machine import machine_facts

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
MINUTES = 4.75
SMALLEST = "random-7m"
SERVED = ("random-0.5b", SMALLEST)
BACKENDS = ("triton", "torch")
"""Backends that serve models on a GPU."""
CPU_PATIENCE = 20
"""Factor for time limits on a CPU, which is slower."""
FORMAT = 1


def plan(device: str, *, quick: bool) -> list[Part]:
    """The parts, the most important first, as time may run out."""
    parts = [Part("memory", memory, (), 30)]
    parts += [Part(f"check {name}", attention.check, (name,), 45) for name in attention.NAMES]
    parts += [Part(f"time {name}", attention.times, (name,), 30) for name in attention.NAMES]
    parts.append(Part(f"make {SMALLEST}", serving.models, (SMALLEST,), 30))
    parts += [Part(f"tokens {name}", serving.tokens, (SMALLEST, name, True), 45) for name in BACKENDS]
    for model in (SMALLEST,) if quick else SERVED:
        if model != SMALLEST:
            parts.append(Part(f"make {model}", serving.models, (model,), 60))
        parts += [
            Part(f"serve {model}, {name}, graphs {word}", serving.ours, (model, name, has_graphs), 40)
            for name in BACKENDS
            for word, has_graphs in (("on", True), ("off", False))
            # Without graphs both are the same.
            if has_graphs <= (device == "cuda" and name != "torch")
        ]
        parts += [
            Part(f"serve {model}, transformers {peer}", serving.theirs, (model, peer), 45)
            for peer in serving.PEERS
        ]
    patience = CPU_PATIENCE if device == "cpu" else 1
    return [part._replace(seconds=patience * part.seconds) for part in parts]


def facts(options: Options) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": options.device,
        "quick": options.quick,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": machine_facts(ROOT),
    }


def results_path() -> Path:
    """$OUT: a file, or a directory for it."""
    out = os.environ.get("OUT")
    if not out:
        return RESULTS
    return Path(out) / RESULTS.name if Path(out).is_dir() else Path(out)


def shown(result: dict[str, Any]) -> str:
    """One line for a part without figures, else a line for each figure."""
    head = f"{result['part']} ({result['seconds']} s): {result['status']}"
    if "reason" in result:
        return f"{head}: {result['reason'].strip().splitlines()[-1]}"
    lines = [f"  {name}: {value}" for name, value in result["figures"].items() if name != "first_tokens"]
    return "\n".join([head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description="Checks and times the CUDA path.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="as small as shows that all of it runs")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no part runs longer than until then")
    parser.add_argument("--only", nargs="+", metavar="PREFIX", help="parts whose names begin so, and memory")
    parser.add_argument("--cache", type=Path, default=ROOT / ".tokenmill")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    options = Options(device=given.device, quick=given.quick, cache=str(given.cache))
    if given.device == "cpu":
        print("This runs on a CPU: it shows that everything runs, and says nothing about a GPU.")
    preload()
    path = results_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {**facts(options), "parts": []}
    wanted = ("memory", *(given.only or [""]))
    parts = [part for part in plan(given.device, quick=given.quick) if part.name.startswith(wanted)]
    for result in run_all(parts, options, deadline):
        print(shown(result), flush=True)
        content["parts"].append(result)
        path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"results: {path}")
    is_wrong = any(part["status"] in ("failed", "timeout") for part in content["parts"])
    return int(is_wrong or any(part.get("figures", {}).get("wrong") for part in content["parts"]))


if __name__ == "__main__":
    raise SystemExit(main())
