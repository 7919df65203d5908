"""Defines what is measured: which engine serves which workload of which model, and how often.

A plan is a list of cells that is made before anything runs. The target table and the whole matrix are two
plans; filters only remove cells.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.serving.shapes import MODELS
from benchmarks.serving.systems import OPEN, OURS, REFERENCE, SERVICE, SWEPT, SYSTEMS, modes_of
from benchmarks.serving.workloads import KINDS

SMOLLM2, SMALL, MEDIUM = "smollm2-135m", "random-7m", "random-0.5b"
VLLM = ("vllm-eager", "vllm-compiled")
LLAMA_CPP = ("llama.cpp", "llama.cpp-unified")
REPEATS = 3
"""Of each cell in a whole run."""
FAR = {
    REFERENCE,
    "transformers-static",
    "transformers-continuous",
    *(mode for name in LLAMA_CPP for mode in modes_of(name)),
}
"""Measured once: far enough from ours that a spread would say nothing, and slow. But for one stream, which
takes seconds, and where nobody is far."""
SHORT_CHUNKS = "tokenmill-short-chunks"
OWN = (OURS, SERVICE, SHORT_CHUNKS)


class Place(NamedTuple):
    """What several engines are compared on."""

    model: str
    dtype: str
    workload: str


class Cell(NamedTuple):
    model: str
    dtype: str
    workload: str
    system: str

    @property
    def place(self) -> Place:
        return Place(self.model, self.dtype, self.workload)


class Group(NamedTuple):
    """Engines of one group are loaded side by side, and take turns."""

    model: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What is kept; empty: everything."""

    models: Collection[str] = ()
    dtypes: Collection[str] = ()
    workloads: Collection[str] = ()
    systems: Collection[str] = ()

    def keeps(self, cell: Cell) -> bool:
        wanted = (self.models, self.dtypes, self.workloads, self.systems)
        return all(not names or value in names for value, names in zip(cell, wanted, strict=True))


_FLOAT32 = {
    "mixed": (OURS, REFERENCE, "transformers-static", "transformers-continuous", *VLLM),
    "shared-prefix": (OURS, "transformers-continuous", *VLLM),
    "one-stream": (OURS,),
    "long-and-chats": (OURS, SHORT_CHUNKS, *VLLM),
}
_BFLOAT16 = dict.fromkeys(("mixed", "shared-prefix", "long-and-chats"), (OURS, *VLLM))
#: On the model that people run, not on random weights.
_USUAL_MODEL = {"mixed": (SERVICE, *LLAMA_CPP), "one-stream": LLAMA_CPP}
TARGET_TABLE = (
    (SMALL, "float32", _FLOAT32),
    (SMALL, "bfloat16", _BFLOAT16),
    (SMOLLM2, "bfloat16", _BFLOAT16),
    (SMOLLM2, "float32", _FLOAT32),
    (SMOLLM2, "float32", _USUAL_MODEL),
)
"""The model that people run comes last: what the others leave of the time goes to its repeats."""


def target_cells() -> list[Cell]:
    """Those that the table of targets speaks of."""
    return [
        Cell(model, dtype, workload, system)
        for model, dtype, workloads in TARGET_TABLE
        for workload, systems in workloads.items()
        for system in systems
    ]


def sweep_cells() -> list[Cell]:
    """Every engine that has a budget of tokens, with each of its budgets, beside ours as it is shipped."""
    systems = (OURS, *(mode for name in SWEPT for mode in modes_of(name)))
    return [Cell(model, "float32", "mixed", system) for model in (SMALL, SMOLLM2) for system in systems]


def all_cells() -> list[Cell]:
    """The whole matrix, what an engine cannot serve left in: its reason belongs into the table."""
    return [
        Cell(model, dtype, workload, system)
        for model in MODELS
        for dtype in ("float32", "bfloat16")
        for workload in KINDS
        for system in SYSTEMS
        if (system != SHORT_CHUNKS or workload == "long-and-chats")
        and (SYSTEMS[system].token_budget is None or workload == "mixed")
    ]


def reason_against(cell: Cell) -> str | None:
    """Why an engine is not even asked."""
    return SYSTEMS[cell.system].cannot.get(cell.workload)


def repeats_of(cell: Cell, repeats: int) -> int:
    return min(repeats, 1) if cell.system in FAR and cell.workload != "one-stream" else repeats


def groups(cells: Iterable[Cell]) -> dict[Group, list[Cell]]:
    """The cells that share a model and a dtype, in the plan's order; open loops after what they build on."""
    grouped: dict[Group, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.workload in OPEN):
        grouped.setdefault(Group(cell.model, cell.dtype), []).append(cell)
    return grouped
