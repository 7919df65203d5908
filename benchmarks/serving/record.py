"""One run's results: a JSON file that is whole after every measurement, so that what was stopped goes on.

Law: nothing is kept in memory alone, and nothing is measured twice into one file. Knows no process.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving.plan import Cell

FORMAT = 1


class Run(NamedTuple):
    """One repeat of a cell. `figures`: see `figures.run_figures`, with cpu_seconds and peak_bytes."""

    cell: Cell
    repeat: int
    figures: dict[str, Any]


class Record:
    """The file at `path`, read if it is there."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            "format": FORMAT,
            **facts,
            "loads": [],
            "runs": [],
            "failures": [],
            "floors": [],
        }
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["format"] != FORMAT:
                raise ValueError(f"{path} has format {self.content['format']}, not {FORMAT}")

    @property
    def runs(self) -> list[Run]:
        return [Run(cell_of(row), row["repeat"], row) for row in self.content["runs"]]

    @property
    def failures(self) -> dict[Cell, str]:
        return {cell_of(row): row["reason"] for row in self.content["failures"]}

    def has(self, cell: Cell, repeat: int) -> bool:
        return any(run.cell == cell and run.repeat == repeat for run in self.runs)

    def add_run(self, cell: Cell, repeat: int, figures: dict[str, Any]) -> None:
        self.content["failures"] = [row for row in self.content["failures"] if cell_of(row) != cell]
        self.content["runs"].append({**cell._asdict(), "repeat": repeat, **figures})
        self.save()

    def add_failure(self, cell: Cell, reason: str) -> None:
        self.content["failures"] = [row for row in self.content["failures"] if cell_of(row) != cell]
        self.content["failures"].append({**cell._asdict(), "reason": reason})
        self.save()

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """A row of `loads` or `floors`."""
        self.content[kind].append(row)
        self.save()

    def floor(self, model: str, dtype: str, workload: str) -> float | None:
        """Seconds, or None where it was not computed."""
        wanted = {"model": model, "dtype": dtype, "workload": workload}
        found = (row["seconds"] for row in self.content["floors"] if wanted.items() <= row.items())
        return next(found, None)

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(unfinished, self._path)


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))
