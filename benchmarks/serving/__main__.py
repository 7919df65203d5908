"""Measures Tokenmill and other engines side by side, and writes the results, a table and plots.

python -m benchmarks.serving                      the cells of the targets, in under an hour
python -m benchmarks.serving --all --minutes 0    the whole matrix, however long it takes
python -m benchmarks.serving --sweep --minutes 0  other engines with each budget of tokens a step
python -m benchmarks.serving --quick              every engine once, in minutes

How the hour holds: the environments are made before it begins. Each model in each dtype gets a share, by what
its cells usually take. In a share all cells have their first run before any has a second one. An engine that
takes very much longer than ours is waited for only while nobody else wants the time: it is cut short once it
has shown that its target is met by far. Both had the same requests, so ours is faster by more than its time
over the time of ours, and the tables say so. Its process is ended, and loaded again for its other workloads
only in time that nobody else wants. Repeats begin with the workload that is nearest to its target.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.budget import Budget, Needs, share
from benchmarks.serving.engine_processes import EngineProcesses, variables
from benchmarks.serving.environments import DEFAULT_HOME, ROOT, CannotMake, make
from benchmarks.serving.estimates import Estimates
from benchmarks.serving.machine import machine_facts
from benchmarks.serving.plan import (
    REPEATS,
    SMALL,
    Cell,
    Filter,
    Group,
    Place,
    all_cells,
    groups,
    reason_against,
    sweep_cells,
    target_cells,
)
from benchmarks.serving.protocol import Settings
from benchmarks.serving.record import OtherConditions, Record
from benchmarks.serving.references import References
from benchmarks.serving.report import report
from benchmarks.serving.roofline import Rates, floor_seconds
from benchmarks.serving.session import Session
from benchmarks.serving.shapes import BYTES, MODELS, Shape, read_shape
from benchmarks.serving.systems import REFERENCE, SYSTEMS
from benchmarks.serving.workloads import KINDS, NUM_REQUESTS, count_requests, make_workload

RESULTS = ROOT / "benchmarks" / "results"
FOR_EVER = 1e9
QUICK_REQUESTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The same for all engines. The KV cache holds the fullest moment of every workload."""

    threads: int
    token_budget: int
    max_seqs: int
    max_model_len: int = 8192
    kv_tokens: int = 32768


def main() -> int:
    args = parse(sys.argv[1:])
    home = args.home.resolve()
    cells = chosen_cells(args)
    limits = Limits(threads=args.threads, token_budget=args.token_budget, max_seqs=args.max_seqs)
    begun = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    path = args.out or RESULTS / f"serving-{begun:%Y%m%d-%H%M%S}.json"
    try:
        record = begin_record(path, begun.isoformat(), args, limits, cells)
    except OtherConditions as error:
        print(f"{error}; choose another --out", file=sys.stderr)
        return 2
    grouped = groups(with_environments(cells, record, home))
    end = time.monotonic() + (60 * args.minutes or FOR_EVER)
    needs = [needs_of(group, members, args, record) for group, members in grouped.items()]
    for place, (group, members) in enumerate(grouped.items()):
        # What a group leaves of its share goes to those after it.
        begins = time.monotonic()
        deadline = begins + share(end - begins, needs[place:])
        measure_group(group, members, args, limits, record, home, deadline)
    text = report(record)
    path.with_suffix(".md").write_text(text)
    print(text)
    plot(path, home)
    print(f"written: {path}", file=sys.stderr)
    return 0


def begin_record(
    path: Path, begun: str, args: argparse.Namespace, limits: Limits, cells: list[Cell]
) -> Record:
    """A new file, or one that was measured alike. Raises `OtherConditions`, and writes nothing then."""
    facts = {
        "begun": begun,
        "command": sys.argv[1:],
        "machine": machine_facts(ROOT),
        "limits": {name: getattr(limits, name) for name in Limits.__slots__},
    }
    record = Record.begin(path, facts)
    for place in dict.fromkeys(cell.place for cell in cells):
        record.check_requests(place, count_requests(place.workload, asked_requests(args, place.model)))
    record.save()
    return record


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenmill and other engines side by side.")
    parser.add_argument("--all", action="store_true", help="the whole matrix, not the cells of the targets")
    parser.add_argument(
        "--sweep", action="store_true", help="other engines with each budget of tokens a step"
    )
    parser.add_argument("--quick", action="store_true", help="few requests, one repeat, the smallest model")
    for name, known in (("system", SYSTEMS), ("workload", KINDS), ("model", MODELS), ("dtype", BYTES)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(known), default=[], help="only these")
    parser.add_argument("--repeats", type=int, default=None, help=f"of each cell; default {REPEATS}")
    parser.add_argument(
        "--minutes", type=float, default=55.0, help="that everything may take; 0: as long as it takes"
    )
    parser.add_argument("--requests", type=int, default=None, help=f"of a workload; default {NUM_REQUESTS}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--token-budget", type=int, default=512, help="tokens that one step computes at most")
    parser.add_argument("--max-seqs", type=int, default=64)
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="of environments, models and logs")
    parser.add_argument("--out", type=Path, help="the file of results; one that is there is completed")
    return parser.parse_args(words)


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    """The plan, filtered. `--quick` takes the smallest model unless one is named."""
    models = args.model or ([SMALL] if args.quick else [])
    kept = Filter(models=models, dtypes=args.dtype, workloads=args.workload, systems=args.system)
    return [cell for cell in planned_cells(args) if kept.keeps(cell)]


def planned_cells(args: argparse.Namespace) -> list[Cell]:
    if args.sweep:
        return sweep_cells()
    return all_cells() if args.all or args.quick else target_cells()


def asked_requests(args: argparse.Namespace, model: str) -> int:
    """What `make_workload` is given for a model."""
    return int(args.requests or (QUICK_REQUESTS if args.quick else MODELS[model].num_requests))


def asked_repeats(args: argparse.Namespace) -> int:
    return int(args.repeats or (1 if args.quick else REPEATS))


def with_environments(cells: list[Cell], record: Record, home: Path) -> list[Cell]:
    """The cells whose engines can be run here, their environments made; the others are recorded as failed."""
    lacking: dict[str, str] = {}
    for name in dict.fromkeys(SYSTEMS[system].environment for system in (*systems_of(cells), REFERENCE)):
        try:
            make(name, home)
        except CannotMake as error:
            lacking[name] = str(error)
    for cell in cells:
        if reason := lacking.get(SYSTEMS[cell.system].environment):
            record.add_failure(cell, reason)
    return [cell for cell in cells if SYSTEMS[cell.system].environment not in lacking]


def systems_of(cells: list[Cell]) -> dict[str, None]:
    """In their order."""
    return dict.fromkeys(cell.system for cell in cells)


def estimates_of(group: Group, args: argparse.Namespace, record: Record) -> Estimates:
    whole = MODELS[group.model].num_requests
    return Estimates(group=group, record=record, portion=asked_requests(args, group.model) / whole)


def needs_of(group: Group, cells: list[Cell], args: argparse.Namespace, record: Record) -> Needs:
    """Of what the record has not yet."""
    estimates = estimates_of(group, args, record)
    possible = [cell for cell in cells if not reason_against(cell)]
    lacking = [cell for cell in possible if not record.has(cell, 0)]
    return Needs(estimates.whole_first_round(lacking), estimates.repeats(possible, asked_repeats(args)))


def measure_group(
    group: Group,
    cells: list[Cell],
    args: argparse.Namespace,
    limits: Limits,
    record: Record,
    home: Path,
    deadline: float,
) -> None:
    """One model in one dtype: its floors, then all its cells."""
    print(f"{group.model}, {group.dtype}", file=sys.stderr, flush=True)
    directory = made_model(group.model, home)
    shape = read_shape(directory)
    settings = settings_of(directory, group, shape, limits, home)
    requests = asked_requests(args, group.model)
    record_floors(record, group, shape, settings, sorted({cell.workload for cell in cells}), requests)
    session = Session(
        group=group,
        cells=cells,
        shape=shape,
        kv_bytes=settings.kv_bytes,
        num_requests=requests,
        deadline=deadline,
        record=record,
        budget=Budget(estimates=estimates_of(group, args, record), repeats=asked_repeats(args)),
        references=References(home / "references"),
    )
    with EngineProcesses(group, settings, record, home) as engines:
        session.measure(engines)


def settings_of(directory: Path, group: Group, shape: Shape, limits: Limits, home: Path) -> Settings:
    return Settings(
        model=str(directory),
        dtype=group.dtype,
        threads=limits.threads,
        token_budget=limits.token_budget,
        max_seqs=limits.max_seqs,
        max_model_len=limits.max_model_len,
        kv_tokens=limits.kv_tokens,
        kv_bytes=limits.kv_tokens * shape.kv_elements * BYTES[group.dtype],
        scratch=str(home / "scratch"),
        options={},
    )


def made_model(name: str, home: Path) -> Path:
    """The directory of a model, made by a process of its own: this one stays small and without threads."""
    said = run_module("benchmarks.serving.make_model", [name, str(home / "models")])
    return Path(said.splitlines()[-1])


def record_floors(
    record: Record, group: Group, shape: Shape, settings: Settings, workloads: list[str], requests: int
) -> None:
    """The floor of each workload that has none yet. An open loop has none: its arrivals decide."""
    closed = [name for name in workloads if KINDS[name].load is None]
    lacking = [name for name in closed if record.floor(Place(*group, name)) is None]
    if not lacking:
        return
    rates = recorded_rates(record, group) or measured_rates(shape, settings)
    for name in lacking:
        workload = make_workload(name, vocab_size=shape.vocab_size, repeat=0, num_requests=requests)
        seconds = floor_seconds(
            workload,
            shape,
            rates,
            group.dtype,
            token_budget=settings.token_budget,
            max_seqs=settings.max_seqs,
        )
        floor: dict[str, Any] = {**group._asdict(), "workload": name, "seconds": seconds}
        record.add("floors", floor | {name: getattr(rates, name) for name in Rates.__slots__})


def recorded_rates(record: Record, group: Group) -> Rates | None:
    """Those of the floors that the record has: all workloads of a group are judged by the same."""
    known = (row for row in record.content["floors"] if group._asdict().items() <= row.items())
    return next((Rates(**{name: row[name] for name in Rates.__slots__}) for row in known), None)


def measured_rates(shape: Shape, settings: Settings) -> Rates:
    words = [str(settings.threads), settings.dtype, str(shape.weights * BYTES[settings.dtype])]
    said = run_module("benchmarks.serving.measure_machine", words, variables(settings))
    return Rates(**json.loads(said))


def run_module(module: str, words: list[str], extra: dict[str, str] | None = None) -> str:
    """What a module of this tree prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, **(extra or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def plot(path: Path, home: Path) -> None:
    """Draw the figures; without them the results are whole all the same."""
    try:
        python = make("plots", home)
    except CannotMake as error:
        print(f"no plots: {error}", file=sys.stderr)
        return
    subprocess.run([str(python), "-m", "benchmarks.serving.plots", str(path)], cwd=ROOT, check=False)


if __name__ == "__main__":
    sys.exit(main())
