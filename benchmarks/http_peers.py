"""`tokenmill serve` and `vllm serve` over HTTP: the same model, clients, requests and threads, in turn.

In each round each server is started, warmed up, measured by `tokenmill bench --backend openai` and stopped;
the server that comes first alternates. Both stream `/v1/completions` to as many clients. Ratios are taken
within a round. Writes `benchmarks/results/http-peers.json` after each measurement, and the table beside it.

    python -m benchmarks.http_peers [--rounds 3] [--home DIRECTORY]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.http_servers import (
    MODEL_NAME,
    Limits,
    Server,
    ServerFailed,
    ServerSpec,
    running,
    tokenmill_serve,
    vllm_serve,
)
from benchmarks.serving.children import machine_busy_seconds
from benchmarks.serving.environments import DEFAULT_HOME, ROOT, CannotMake, make
from benchmarks.serving.machine import machine_facts
from benchmarks.serving.shapes import BYTES, read_shape

RESULTS = ROOT / "benchmarks" / "results" / "http-peers.json"
OURS, THEIRS = "tokenmill", "vllm"
BUSY_SHARE = 0.05
"""Of one core: a measurement during which others used more is marked."""
FIGURES = {
    "output tokens/s": (("per_second", "output_tokens"), 1.0),
    "first token p50, ms": (("ttft_seconds", "p50"), 1000.0),
    "first token p99, ms": (("ttft_seconds", "p99"), 1000.0),
    "inter-token p50, ms": (("inter_token_seconds", "p50"), 1000.0),
    "inter-token p99, ms": (("inter_token_seconds", "p99"), 1000.0),
    "end to end p50, s": (("end_to_end_seconds", "p50"), 1.0),
    "server CPU s": (("server_cpu_seconds",), 1.0),
    "server CPU ms / output token": (("server_cpu_seconds_per_token",), 1000.0),
    "generator CPU s": (("generator", "cpu_seconds"), 1.0),
}
"""Row of the table -> where its value is in a run, and its unit in seconds."""


def main() -> int:
    args = parse(sys.argv[1:])
    home = args.home.resolve()
    try:
        make(THEIRS, home)
    except CannotMake as error:
        print(error, file=sys.stderr)
        return 1
    record: dict[str, Any] = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(ROOT),
        "limits": {name: getattr(args.limits, name) for name in Limits.__slots__},
        "load": load_flags(args, round_number=0),
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="tokenmill-http-peers-") as name:
        specs = server_specs(args.limits, model_directory(home), Path(name), home)
        for number in range(args.rounds):
            for spec in specs[:: -1 if number % 2 else 1]:
                record["runs"].append(measure(spec, args, number, home / "logs"))
                args.out.write_text(json.dumps(record, indent=1) + "\n")
                print(f"round {number}, {spec.name}: {headline(record['runs'][-1])}", flush=True)
    text = report(record)
    args.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenmill and vLLM over HTTP.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--input-len", default="16-256")
    parser.add_argument("--output-len", default="16-128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-threads", type=int, help="default: --threads; fewer leave room for its API")
    parser.add_argument("--vllm-step-tokens", type=int, default=1024, help="--max-num-batched-tokens of vLLM")
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="of environments, models and logs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    args.limits = Limits(
        threads=args.threads,
        max_seqs=args.clients,
        max_model_len=2048,
        kv_tokens=32768,
        dtype="float32",
        vllm_threads=args.vllm_threads or args.threads,
        vllm_step_tokens=args.vllm_step_tokens,
    )
    return args


def model_directory(home: Path) -> Path:
    """The default model, converted by a process of its own: this one stays small."""
    command = [sys.executable, "-m", "benchmarks.serving.make_model", "smollm2-135m", str(home / "models")]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Path(said.splitlines()[-1])


def server_specs(limits: Limits, model: Path, scratch: Path, home: Path) -> list[ServerSpec]:
    kv_bytes = limits.kv_tokens * read_shape(model).kv_elements * BYTES[limits.dtype]
    return [
        tokenmill_serve(model, limits, free_port(), scratch),
        vllm_serve(model, limits, free_port(), scratch, home=home, kv_bytes=kv_bytes),
    ]


def measure(spec: ServerSpec, args: argparse.Namespace, round_number: int, logs: Path) -> dict[str, Any]:
    """One server under one load. Raises `ServerFailed` if a request failed."""
    with running(spec, logs / f"http-{spec.name}.log") as server:
        # Every path once, with requests of another seed: nothing that is measured is in a cache.
        bench(spec, [*load_flags(args, round_number=-1), "--requests", str(args.clients)])
        return measured(server, load_flags(args, round_number=round_number), round_number)


def measured(server: Server, flags: list[str], round_number: int) -> dict[str, Any]:
    own, busy = server.cpu_seconds(), machine_busy_seconds()
    run = bench(server.spec, flags)
    cpu_seconds = server.cpu_seconds() - own
    others = machine_busy_seconds() - busy - cpu_seconds - run["generator"]["cpu_seconds"]
    if run["requests"]["failed"] or run["tokens"]["counted_by"] != "server":
        raise ServerFailed(f"{server.spec.name}: {run['requests']}, {run['errors']}")
    for dropped in ("per_request", "server", "at"):
        del run[dropped]
    return {
        "server": server.spec.name,
        "round": round_number,
        "server_cpu_seconds": cpu_seconds,
        "server_cpu_seconds_per_token": cpu_seconds / run["tokens"]["output"],
        "other_cpu_seconds": max(0.0, others),
        **run,
    }


def bench(spec: ServerSpec, flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tokenmill", "bench", "--backend", "openai", "--url", spec.url]
    done = subprocess.run(
        [*command, "--model", MODEL_NAME, "--json", "-", *flags],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ServerFailed(f"the load on {spec.name} failed: {done.stderr[-600:]} {done.stdout[-600:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def load_flags(args: argparse.Namespace, *, round_number: int) -> list[str]:
    """A round's requests are the same for both servers, and others than those of other rounds."""
    return [
        *("--concurrency", str(args.clients), "--requests", str(args.requests)),
        *("--input-len", args.input_len, "--output-len", args.output_len, "--seed", str(round_number)),
    ]


def headline(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value(run, name):.4g}" for name in FIGURES)


def value(run: dict[str, Any], name: str) -> float:
    path, unit = FIGURES[name]
    found: Any = run
    for key in path:
        found = found[key]
    return float(found) * unit


def report(record: dict[str, Any]) -> str:
    """A table in Markdown: medians with extremes, and ratios within rounds."""
    machine, runs = record["machine"], record["runs"]
    rounds = len({run["round"] for run in runs})
    busy = sum(run["other_cpu_seconds"] > BUSY_SHARE * run["seconds"] for run in runs)
    lines = [
        "# Tokenmill and vLLM over HTTP",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"commit {machine['commit']}; "
        f"SmolLM2-135M-Instruct, {record['limits']['dtype']}; {rounds} rounds, begun {record['begun']}.",
        "",
        f"`tokenmill bench --backend openai {' '.join(record['load'])}`; limits: "
        + ", ".join(f"{name} {limit}" for name, limit in record["limits"].items())
        + ".",
        "",
        f"In {busy} of {len(runs)} runs others took more than {BUSY_SHARE:.0%} of one core.",
        "",
        "| | tokenmill (least to most) | vllm (least to most) | tokenmill / vllm (least to most) |",
        "| --- | --- | --- | --- |",
        *(_row(name, *_columns(runs, name)) for name in FIGURES),
    ]
    return "\n".join([*lines, ""])


def _columns(runs: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Values of both servers, round by round; a round that lacks one is left out."""
    by_round = {(run["round"], run["server"]): value(run, name) for run in runs}
    rounds = sorted(number for number, server in by_round if server == OURS and (number, THEIRS) in by_round)
    return [by_round[number, OURS] for number in rounds], [by_round[number, THEIRS] for number in rounds]


def _row(name: str, ours: list[float], theirs: list[float]) -> str:
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    return f"| {name} | {_spread(ours)} | {_spread(theirs)} | {_spread(ratios)} |"


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{_short(median(values))} ({_short(min(values))} to {_short(max(values))})"


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
