"""Engines without processes: the duration of each call is given and advances a clock without waiting."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from benchmarks.serving.budget import Budget
from benchmarks.serving.children import Answer, Failed, TooSlow
from benchmarks.serving.engine_processes import EngineProcesses
from benchmarks.serving.estimates import Estimates
from benchmarks.serving.plan import Cell, Group
from benchmarks.serving.record import Record
from benchmarks.serving.references import References
from benchmarks.serving.session import Session
from benchmarks.serving.shapes import Shape
from benchmarks.serving.workloads import Workload

SHAPE = Shape(vocab_size=100, layer_weights=1000, head_weights=200, kv_elements=10, score_elements=5)
NEVER = 1e6


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_at_most(self, seconds: float, limit: float) -> None:
        """Raises `TooSlow` where the limit comes first."""
        self.now += min(seconds, limit)
        if seconds > limit:
            raise TooSlow(limit)


@dataclass
class FakeCrew:
    """`seconds`: of (engine, workload), where "" stands for every other workload; `loads`: of an engine.

    `events`: what was done, in order.
    """

    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    loads: Mapping[str, float] = field(default_factory=dict)
    clock: FakeClock = field(default_factory=FakeClock)
    warm_up: float = 0.0
    loaded: set[str] = field(default_factory=set)
    events: list[tuple[str, ...]] = field(default_factory=list)

    def prepare(self, system: str, _: Workload, *, load_limit: float, limit: float) -> None:
        try:
            if system not in self.loaded:
                self.events.append(("load", system))
                self.clock.pass_at_most(self.loads.get(system, 0.0), load_limit)
                self.loaded.add(system)
            self.clock.pass_at_most(self.warm_up, limit)
        except TooSlow as error:
            self.loaded.discard(system)
            raise Failed(str(error)) from error

    def serve(self, system: str, workload: Workload, limit: float) -> tuple[Answer, int]:
        assert system in self.loaded
        self.events.append(("run", system, workload.name))
        counts = [request.max_tokens for request in workload.requests]
        usual = self.seconds.get((system, ""), float(max(counts)))
        seconds = self.seconds.get((system, workload.name), usual)
        try:
            self.clock.pass_at_most(seconds, limit)
        except TooSlow:
            self.loaded.discard(system)
            raise
        message = {
            "tokens": [[1] * count for count in counts],
            "times": [[seconds * (place + 1) / max(counts) for place in range(count)] for count in counts],
            "details": {},
        }
        return Answer(message, seconds, 1.0, 0.0), 1

    def release(self, system: str) -> None:
        self.loaded.discard(system)

    @property
    def runs(self) -> list[tuple[str, ...]]:
        return [event[1:] for event in self.events if event[0] == "run"]


class KnownReferences(References):
    """They take no time."""

    def __init__(self) -> None:
        super().__init__(Path())

    def tokens(self, *_: object, **__: object) -> list[list[int]]:
        return [[1]]


def measure(
    engines: FakeCrew,
    record: Record,
    cells: list[Cell],
    repeats: int,
    *,
    seconds: float = float("inf"),
    references: References | None = None,
) -> None:
    """A session of the cells of one group, with so many seconds and two requests in a workload."""
    group = Group(*cells[0][:2])
    estimates = Estimates(group=group, record=record)
    session = Session(
        group=group,
        cells=cells,
        shape=SHAPE,
        kv_bytes=1,
        num_requests=2,
        deadline=engines.clock() + seconds,
        record=record,
        budget=Budget(estimates=estimates, repeats=repeats),
        references=references or KnownReferences(),
        clock=engines.clock,
    )
    session.measure(cast(EngineProcesses, engines))
