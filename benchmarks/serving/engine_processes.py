"""Holds the engine processes of one group: loads each on first use, warms it up, suspends it while another
runs.

Invariants: at most one engine uses processor time at once, and a failed engine is ended before anything else
runs. Records the cost of loading. Raises `Failed` if an engine fails.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.serving.children import Answer, Child, Failed, TooSlow
from benchmarks.serving.environments import ROOT, CannotMake, make
from benchmarks.serving.plan import Group
from benchmarks.serving.protocol import Settings
from benchmarks.serving.record import Record
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.workloads import Workload

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 4


class EngineProcesses:
    """`settings`: of the group, without the options of one engine. `home`: of environments and logs."""

    def __init__(self, group: Group, settings: Settings, record: Record, home: Path) -> None:
        self._group, self._settings, self._record, self._home = group, settings, record, home
        self._children: dict[str, Child] = {}
        #: Those that could not be loaded, with the reason: not tried again for every workload.
        self._hopeless: dict[str, str] = {}
        self._warm: set[tuple[str, str]] = set()

    def __enter__(self) -> "EngineProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for system in list(self._children):
            self.release(system)

    @property
    def loaded(self) -> frozenset[str]:
        return frozenset(self._children)

    def prepare(self, system: str, warm_up: Workload, *, load_limit: float, limit: float) -> None:
        """Load it, and have it touch every path of a workload once; limits in seconds. Raises `Failed`."""
        child = self._loaded(system, load_limit)
        if (system, warm_up.name) in self._warm:
            return
        try:
            child.ask(run_message(shortened(warm_up)), limit)
        except TooSlow as error:
            self.release(system)
            # What is done once and never again is part of it, so it says nothing about the workload.
            raise Failed(
                f"its warm-up, {WARM_UP_REQUESTS} requests with {WARM_UP_TOKENS} tokens each, had not ended"
                f" after {error.seconds:.0f} s"
            ) from error
        except Failed:
            self.release(system)
            raise
        self._warm.add((system, warm_up.name))
        child.stop()

    def serve(self, system: str, workload: Workload, limit: float) -> tuple[Answer, int]:
        """Have a workload served by an engine that was prepared; the answer, and the most bytes of memory
        meanwhile. Raises `Failed`; after `TooSlow` the workload would have taken longer than the limit."""
        child = self._children[system]
        try:
            child.resume()
            child.forget_peak()
            answer = child.ask(run_message(workload), limit)
            peak_bytes = child.peak_bytes()
        except Failed:
            self.release(system)
            raise
        child.stop()
        return answer, peak_bytes

    def release(self, system: str) -> None:
        """End it; it is loaded again when it is asked again."""
        if child := self._children.pop(system, None):
            child.close()
        self._warm = {(warm, workload) for warm, workload in self._warm if warm != system}

    def _loaded(self, system: str, limit_seconds: float) -> Child:
        if system in self._hopeless:
            raise Failed(self._hopeless[system])
        if system not in self._children:
            try:
                self._children[system] = self._load(system, limit_seconds)
            except (Failed, CannotMake) as error:
                self._hopeless[system] = str(error)
                raise Failed(str(error)) from error
        return self._children[system]

    def _load(self, system: str, limit_seconds: float) -> Child:
        kind = SYSTEMS[system]
        print(f"  loading {system}", file=sys.stderr, flush=True)
        python = make(kind.environment, self._home)
        child = Child(
            [str(python), "-m", f"benchmarks.serving.peers.{kind.module}"],
            directory=ROOT,
            variables=variables(self._settings),
            log=self._home / "logs" / f"{'-'.join(self._group)}-{system}.log",
        )
        try:
            budget = kind.token_budget or self._settings.token_budget
            settings = self._settings._replace(options=kind.options, token_budget=budget)
            answer = child.ask({"op": "load", "settings": settings._asdict()}, limit_seconds)
        except TooSlow as error:
            child.close()
            raise Failed(f"not loaded within {error.seconds:.0f} s") from error
        except Failed:
            child.close()
            raise
        figures = {"seconds": answer.seconds, "cpu_seconds": answer.cpu_seconds, **answer.message["details"]}
        self._record.add("loads", {**self._group._asdict(), "system": system, **figures})
        return child


def variables(settings: Settings) -> dict[str, str]:
    """The environment that every engine gets: the threads, and nothing from a network."""
    threads = str(settings.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run_message(workload: Workload) -> dict[str, Any]:
    return {"op": "run", "requests": workload.requests}


def shortened(workload: Workload) -> Workload:
    """Enough to touch every path once: few requests, few tokens, nobody to wait for."""
    few = tuple(
        request._replace(max_tokens=min(request.max_tokens, WARM_UP_TOKENS), arrival=0.0)
        for request in workload.requests[:WARM_UP_REQUESTS]
    )
    return replace(workload, requests=few)
