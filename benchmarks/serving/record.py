"""Stores the results of a run in a JSON file that is complete after each measurement and can be continued.

All runs of a file have the same limits, machine and numbers of requests; a difference is refused. Nothing is
measured twice into one file.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving.plan import Cell, Place

FORMAT = 1
SAME_MACHINE = ("cpu", "cores", "flags")
"""What must be alike of two machines, for their figures to stand in one table."""


class OtherConditions(ValueError):
    """The file holds what was measured otherwise, so this run cannot complete it."""


class Run(NamedTuple):
    """One repeat of a cell. `figures`: see `figures.run_figures`, with cpu_seconds and peak_bytes."""

    cell: Cell
    repeat: int
    figures: dict[str, Any]

    @property
    def num_requests(self) -> int:
        per_second, seconds = float(self.figures["requests_per_second"]), float(self.figures["seconds"])
        return round(per_second * seconds)


class Record:
    """What the file at `path` holds, and is to hold: see `begin` and `read`."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self.content = content

    @classmethod
    def begin(cls, path: Path, facts: dict[str, Any]) -> "Record":
        """A new record, or one more run that completes what is there; nothing is written yet.

        `facts`: `begun`, `command`, `machine` and `limits` of this run. Raises `OtherConditions`.
        """
        if not path.exists():
            empty: dict[str, Any] = {"loads": [], "runs": [], "cut_short": [], "failures": [], "floors": []}
            return cls(path, {"format": FORMAT, **facts, **empty})
        record = cls.read(path)
        record._continue(facts)
        return record

    @classmethod
    def read(cls, path: Path) -> "Record":
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise OtherConditions(f"{path} has format {content['format']}, not {FORMAT}")
        content.setdefault("cut_short", [])
        return cls(path, content)

    def _continue(self, facts: dict[str, Any]) -> None:
        if facts["limits"] != self.content["limits"]:
            raise OtherConditions(f"{self._path} has the limits {self.content['limits']}")
        known, here = self.content["machine"], facts["machine"]
        if any(known[name] != here[name] for name in SAME_MACHINE):
            raise OtherConditions(f"{self._path} was measured on {known['cpu']}, {known['cores']} cores")
        self.content.setdefault("continued", []).append(facts)

    @property
    def runs(self) -> list[Run]:
        return [Run(cell_of(row), row["repeat"], row) for row in self.content["runs"]]

    @property
    def failures(self) -> dict[Cell, str]:
        return {cell_of(row): row["reason"] for row in self.content["failures"]}

    @property
    def cut_short(self) -> dict[Cell, float]:
        """The seconds after which a cell that never ended was given up."""
        return {cell_of(row): row["seconds"] for row in self.content["cut_short"]}

    def check_requests(self, place: Place, num_requests: int) -> None:
        """Raises `OtherConditions` when the workload was run here with another number of requests."""
        if (other := self.num_requests(place)) not in (None, num_requests):
            raise OtherConditions(
                f"{self._path} has {place.workload} with {other} requests, not {num_requests}"
            )

    def num_requests(self, place: Place) -> int | None:
        """With how many the workload was run; None where nothing ran."""
        return next((run.num_requests for run in self.runs if run.cell.place == place), None)

    def has(self, cell: Cell, repeat: int) -> bool:
        return any(run.cell == cell and run.repeat == repeat for run in self.runs)

    def add_run(self, cell: Cell, repeat: int, figures: dict[str, Any]) -> None:
        self._forget(cell, "failures", "cut_short")
        self.content["runs"].append({**cell._asdict(), "repeat": repeat, **figures})
        self.save()

    def add_cut(self, cell: Cell, seconds: float) -> None:
        """It had not ended after so long; of several such times the longest says most."""
        longest = max(seconds, self.cut_short.get(cell, 0.0))
        self._forget(cell, "failures", "cut_short")
        self.content["cut_short"].append({**cell._asdict(), "seconds": longest})
        self.save()

    def add_failure(self, cell: Cell, reason: str) -> None:
        """Nothing is added where something is known: that a cell takes longer than a time."""
        if cell in self.cut_short:
            return
        self._forget(cell, "failures")
        self.content["failures"].append({**cell._asdict(), "reason": reason})
        self.save()

    def _forget(self, cell: Cell, *kinds: str) -> None:
        for kind in kinds:
            self.content[kind] = [row for row in self.content[kind] if cell_of(row) != cell]

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """A row of `loads` or `floors`."""
        self.content[kind].append(row)
        self.save()

    def floor(self, place: Place) -> float | None:
        """Seconds, or None where it was not computed."""
        wanted = place._asdict().items()
        return next((row["seconds"] for row in self.content["floors"] if wanted <= row.items()), None)

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(unfinished, self._path)


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))
