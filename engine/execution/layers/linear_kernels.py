"""The kernels to multiply with a linear's weight: plain, packed by oneDNN, packed by our own operator.

Law: all give the same product but for rounding. A kernel that this machine or this dtype does not have says
so when a weight is bound to it. This file does not know which kernel is faster.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.linear_self_check import check_linears
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., inputs] -> [..., outputs]."""


class LinearKernel(Protocol):
    """One kernel. `name`: for people."""

    @property
    def name(self) -> str: ...

    def bind(self, plain: nn.Linear) -> Product:
        """Bind to this weight and bias. Raises `UnsupportedModel` if the kernel does not support them."""
        ...


class Plain(NamedTuple):
    """As torch has it. Takes everything, and no memory of its own."""

    name: str = "plain"

    def bind(self, plain: nn.Linear) -> Product:
        return partial(linear, weight=plain.weight, bias=plain.bias)


class OneDnn(NamedTuple):
    """In oneDNN's order, through the operators that torch's own compiler uses for frozen weights."""

    name: str = "oneDNN"

    def bind(self, plain: nn.Linear) -> Product:
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            # A build without oneDNN, or a dtype that this processor cannot multiply.
            raise UnsupportedModel(str(error).splitlines()[0]) from error
        return partial(_multiply_by_onednn, packed, plain.bias)


class Native(NamedTuple):
    """In the order of our own operator."""

    operator: LinearOperator
    name: str = "native"

    def bind(self, plain: nn.Linear) -> Product:
        bias = None if plain.bias is None else plain.bias.detach().contiguous()
        if bias is not None and bias.dtype != plain.weight.dtype:
            raise UnsupportedModel(f"a bias of {bias.dtype} beside a weight of {plain.weight.dtype}")
        return partial(self.operator.multiply, weight=self.operator.pack(plain.weight.detach()), bias=bias)


def linear_kernels(library: NativeLibrary | None) -> tuple[LinearKernel, ...]:
    """All that there are, `Plain` first. The native one has been tried, and is left out if it is wrong."""
    if library is None:
        return (Plain(), OneDnn())
    try:
        operator = LinearOperator(library)
        check_linears(operator)
    except CannotBuild as error:
        logger.warning("linears are multiplied by torch alone: %s", error)
        return (Plain(), OneDnn())
    return (Plain(), OneDnn(), Native(operator))


def _multiply_by_onednn(
    packed: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    return product
