"""Packs the linears of a model without measuring anything."""

from collections.abc import Sequence

import pytest
from torch import nn

from engine.execution.linear_ways import Way, linear_ways
from engine.execution.packed_linears import ROW_COUNTS, Candidate, Measure, Seconds, pack_linears
from tests.engine.execution.pools import native_library

PLENTY = 1 << 40


def favour(name: str) -> Measure:
    """Finds that the way of this name is the fastest for all row counts."""

    def measure(candidates: Sequence[Candidate], like: nn.Linear) -> list[Seconds]:
        return [(1.0 if one.way.name == name else 2.0,) * len(ROW_COUNTS) for one in candidates]

    return measure


def all_ways() -> tuple[Way, ...]:
    return linear_ways(native_library())


def pack_all(model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every linear goes the way of this name; gives how many."""
    monkeypatch.setattr("engine.execution.packed_linears.SMALLEST", 0)
    return pack_linears(model, all_ways(), max_bytes=PLENTY, measure=favour(name))
