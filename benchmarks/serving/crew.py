"""The engines of one group: loaded when first asked, warmed up, stopped while another one runs.

Law: at any time at most one engine takes processor time, and an engine that failed is ended before anything
else runs. What loading cost is recorded; a failure is raised as `Failed`. Knows no repeats and no order.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.serving.children import Answer, Child, Failed
from benchmarks.serving.environments import ROOT, CannotMake, make
from benchmarks.serving.plan import Group
from benchmarks.serving.protocol import Settings
from benchmarks.serving.record import Record
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.workloads import Workload

WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds after which an engine counts as failed."""

    load: float = 900.0
    run: float = 1800.0


class Crew:
    """`settings`: of the group, without the options of one engine. `home`: of environments and logs."""

    def __init__(
        self, group: Group, settings: Settings, record: Record, home: Path, patience: Patience
    ) -> None:
        self._group, self._settings, self._record = group, settings, record
        self._home, self._patience = home, patience
        self._children: dict[str, Child] = {}
        #: Those that could not be loaded, with the reason: not tried again for every workload.
        self._hopeless: dict[str, str] = {}
        self._warm: set[tuple[str, str]] = set()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for system in list(self._children):
            self.release(system)

    def serve(self, system: str, workload: Workload, warm_up: Workload) -> tuple[Answer, int]:
        """Have a workload served; the answer, and the most bytes of memory meanwhile. Raises `Failed`."""
        child = self._loaded(system)
        try:
            if (system, workload.name) not in self._warm:
                child.ask(run_message(shortened(warm_up)), self._patience.run)
                self._warm.add((system, workload.name))
            child.resume()
            child.forget_peak()
            answer = child.ask(run_message(workload), self._patience.run)
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

    def _loaded(self, system: str) -> Child:
        if system in self._hopeless:
            raise Failed(self._hopeless[system])
        if system not in self._children:
            try:
                self._children[system] = self._load(system)
            except (Failed, CannotMake) as error:
                self._hopeless[system] = str(error)
                raise Failed(str(error)) from error
        return self._children[system]

    def _load(self, system: str) -> Child:
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
            settings = self._settings._replace(options=kind.options)
            answer = child.ask({"op": "load", "settings": settings._asdict()}, self._patience.load)
        except Failed:
            child.close()
            raise
        figures = {"seconds": answer.seconds, "cpu_seconds": answer.cpu_seconds, **answer.message["told"]}
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
