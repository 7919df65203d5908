"""Linears and kernels for tests of packing, which is done without measuring anything."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_kernels import LinearKernel, Product, linear_kernels
from engine.execution.layers.packed_linears import ROW_COUNTS, Candidate, Measure, Seconds, pack_linears
from tests.engine.execution.pools import native_library

PLENTY = 1 << 40


class Recording:
    """A kernel that notes what is bound and multiplied."""

    def __init__(self, name: str = "recording") -> None:
        self.name = name
        self.bound: list[nn.Linear] = []
        self.multiplied: list[int] = []

    def bind(self, plain: nn.Linear) -> Product:
        self.bound.append(plain)
        return partial(self._multiply, plain)

    def _multiply(self, plain: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        self.multiplied.append(hidden.shape[0])
        return linear(hidden, plain.weight, plain.bias)


class Refusing:
    """A kernel that takes nothing, such as oneDNN's for bfloat16 on an old processor."""

    name = "refusing"

    def bind(self, plain: nn.Linear) -> Product:
        raise UnsupportedModel("bf16 path needs the cpu support avx512bw")


def small(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size) for size in sizes)).requires_grad_(False)


def favour(name: str) -> Measure:
    """Finds that the kernel of this name is the fastest for all row counts."""

    def measure(candidates: Sequence[Candidate], like: nn.Linear) -> list[Seconds]:
        return [(1.0 if one.kernel.name == name else 2.0,) * len(ROW_COUNTS) for one in candidates]

    return measure


def all_ways() -> tuple[LinearKernel, ...]:
    return linear_kernels(native_library())


def pack_all(model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every linear goes the kernel of this name; gives how many."""
    monkeypatch.setattr("engine.execution.layers.packed_linears.SMALLEST", 0)
    return pack_linears(model, all_ways(), max_bytes=PLENTY, measure=favour(name))
