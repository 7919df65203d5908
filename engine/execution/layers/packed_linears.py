"""Multiplies linears on a CPU with packed copies of their weights.

A fixed rule chooses the kernel by dtype, instruction set and number of rows; `docs/decisions.md` has the
measurements of whole steps behind it. Results differ by rounding. The plain weight stays: it serves small
numbers of rows, and other modules may share it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.module_slots import ModuleSlot, linear_slots

log = logging.getLogger(__name__)

MINIMUM_NUMEL = 1 << 14
"""Elements of a weight below which the call costs more than the product."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., inputs] -> [..., outputs]."""


class LinearKernel(NamedTuple):
    """A kernel with weights of its own layout.

    `pack`: packs the weight of a linear; raises `UnsupportedModel` if the kernel does not support it.
    `minimum_rows`: with fewer rows the plain weight is as fast.
    """

    name: str
    pack: Callable[[nn.Linear], Product]
    minimum_rows: int = 0


Rule = Callable[[torch.dtype], tuple[LinearKernel, ...]]
"""The kernels for weights of a dtype, best first."""


class PackedLinear(nn.Module):
    """A linear that multiplies `minimum_rows` and more with its packed weight."""

    def __init__(self, plain: nn.Linear, product: Product, minimum_rows: int) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self._product = product
        self._minimum_numel = minimum_rows * plain.in_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out]."""
        if hidden.numel() < self._minimum_numel:
            return linear(hidden, self.weight, self.bias)
        return self._product(hidden)


def linear_kernels(operator: LinearOperator | None, dtype: torch.dtype) -> tuple[LinearKernel, ...]:
    """The rule. `operator`: None without a native library."""
    onednn = LinearKernel("oneDNN", pack_for_onednn)
    if operator is None:
        return (onednn,)
    native = LinearKernel("native", partial(pack_natively, operator))
    return (onednn, native) if dtype == torch.bfloat16 and _multiplies_bfloat16() else (native, onednn)


def _multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 products, and torch is not limited to AVX2."""
    is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_avx512 and torch.cpu._is_avx512_bf16_supported()


def pack_natively(operator: LinearOperator, plain: nn.Linear) -> Product:
    """Pack for the native operator."""
    bias = None if plain.bias is None else plain.bias.detach().contiguous()
    if bias is not None and bias.dtype != plain.weight.dtype:
        raise UnsupportedModel(f"a bias of {bias.dtype} beside a weight of {plain.weight.dtype}")
    return partial(operator.multiply, weight=operator.pack(plain.weight.detach()), bias=bias)


def pack_for_onednn(plain: nn.Linear) -> Product:
    """Pack for oneDNN, with the operators that torch.compile uses for frozen weights."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        # A build without oneDNN, or a dtype that this processor does not support.
        raise UnsupportedModel(str(error).splitlines()[0]) from error
    return partial(_multiply_by_onednn, packed, plain.bias)


def _multiply_by_onednn(
    packed: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    return product


def pack_linears(model: nn.Module, rule: Rule, *, max_bytes: int) -> int:
    """Pack the plain linears on a CPU, the largest first, while their copies fit into `max_bytes`.

    Returns the number of packed linears. Small linears and those that no kernel supports stay plain.
    """
    num_packed = 0
    for slots in _slots_by_shape(model):
        num_bytes = sum(slot.module.weight.nbytes for slot in slots)
        if num_bytes <= max_bytes and _pack_group(slots, rule):
            max_bytes -= num_bytes
            num_packed += len(slots)
    return num_packed


def _pack_group(slots: list[ModuleSlot[nn.Linear]], rule: Rule) -> bool:
    """Pack linears of one shape with the first kernel that supports them; whether there is one."""
    weight = slots[0].module.weight
    for kernel in rule(weight.dtype):
        try:
            products = [kernel.pack(slot.module) for slot in slots]
        except UnsupportedModel as error:
            log.info("weights of %s are not packed by %s: %s", weight.dtype, kernel.name, error)
            continue
        for slot, product in zip(slots, products, strict=True):
            slot.replace(PackedLinear(slot.module, product, kernel.minimum_rows))
        log.debug("linears of %s %s: %s", list(weight.shape), weight.dtype, kernel.name)
        return True
    return False


def _slots_by_shape(model: nn.Module) -> list[list[ModuleSlot[nn.Linear]]]:
    """The linears worth packing, grouped by shape and dtypes, the largest weights first."""
    groups = defaultdict[tuple[object, ...], list[ModuleSlot[nn.Linear]]](list)
    for slot in linear_slots(model):
        weight, bias = slot.module.weight, slot.module.bias
        if weight.is_cpu and weight.numel() >= MINIMUM_NUMEL:
            groups[weight.shape, weight.dtype, None if bias is None else bias.dtype].append(slot)
    return sorted(groups.values(), key=lambda slots: -slots[0].module.weight.nbytes)
