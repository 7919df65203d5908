"""Linears and kernels for tests of packing."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.packed_linears import (
    LinearKernel,
    Product,
    Rule,
    pack_for_onednn,
    pack_linears,
    pack_natively,
)
from tests.engine.execution.pools import native_library

PLENTY = 1 << 40


class RecordingKernel:
    """A kernel that records what is packed and multiplied."""

    def __init__(self, minimum_rows: int = 0) -> None:
        self.packed: list[nn.Linear] = []
        self.multiplied: list[int] = []
        self.kernel = LinearKernel("recording", self._pack, minimum_rows)

    def _pack(self, plain: nn.Linear) -> Product:
        self.packed.append(plain)
        return partial(self._multiply, plain)

    def _multiply(self, plain: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        self.multiplied.append(hidden.shape[0])
        return linear(hidden, plain.weight, plain.bias)


def refuse(plain: nn.Linear) -> Product:
    """The `pack` of a kernel that supports nothing, such as oneDNN's for bfloat16 on an old processor."""
    raise UnsupportedModel("bf16 path needs the cpu support avx512bw")


REFUSING = LinearKernel("refusing", refuse)


def always(*kernels: LinearKernel) -> Rule:
    """A rule that prefers these kernels for every dtype."""
    return lambda _: kernels


def small(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size) for size in sizes)).requires_grad_(False)


def all_kernels() -> dict[str, LinearKernel]:
    native = LinearKernel("native", partial(pack_natively, LinearOperator(native_library())))
    return {"oneDNN": LinearKernel("oneDNN", pack_for_onednn), "native": native}


def pack_all(model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pack every linear with the kernel of this name. Returns their number."""
    monkeypatch.setattr("engine.execution.layers.packed_linears.MINIMUM_NUMEL", 0)
    return pack_linears(model, always(all_kernels()[name]), max_bytes=PLENTY)
