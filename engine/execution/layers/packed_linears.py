"""Multiplies linears on a CPU with copies of their weights that are packed for the native operator.

A fixed rule by dtype, instruction set and number of rows chooses between the packed and the plain weight;
`docs/decisions.md` has the measurements of whole steps behind it. Results differ by rounding.
"""

import logging
from collections import defaultdict

import torch
from torch import nn
from torch.nn.functional import linear

from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.module_slots import ModuleSlot, linear_slots
from engine.execution.machine.native_library import DTYPES

log = logging.getLogger(__name__)

MINIMUM_NUMEL = 1 << 14
"""Elements of a weight below which the call costs more than the product."""
BFLOAT16_ROWS = 20
"""Rows up to which the native operator is faster than bfloat16 instructions, which it does not use."""


class PackedLinear(nn.Module):
    """A linear that multiplies up to `maximum_rows` (None: any number) with a packed copy of its weight."""

    def __init__(self, plain: nn.Linear, operator: LinearOperator, maximum_rows: int | None) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self._operator = operator
        self._packed = operator.pack(plain.weight.detach())
        self._packed_bias = None if plain.bias is None else plain.bias.detach().contiguous()
        self._maximum_numel = None if maximum_rows is None else maximum_rows * plain.in_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out]."""
        if self._maximum_numel is not None and hidden.numel() > self._maximum_numel:
            return linear(hidden, self.weight, self.bias)
        return self._operator.multiply(hidden, self._packed, self._packed_bias)


def pack_linears(model: nn.Module, operator: LinearOperator, *, max_bytes: int) -> int:
    """Pack the plain linears on a CPU, the largest first, while their copies fit into `max_bytes`.

    Returns the number of packed linears. Small linears and those of other dtypes stay plain.
    """
    num_packed = 0
    for slots in _slots_by_shape(model):
        weight = slots[0].module.weight
        if len(slots) * weight.nbytes > max_bytes:
            continue
        for slot in slots:
            slot.replace(PackedLinear(slot.module, operator, maximum_rows(weight.dtype)))
        max_bytes -= len(slots) * weight.nbytes
        num_packed += len(slots)
        log.debug("%d linears of %s %s are packed", len(slots), list(weight.shape), weight.dtype)
    return num_packed


def maximum_rows(dtype: torch.dtype) -> int | None:
    """Rows up to which the packed weight is faster; None: always."""
    return BFLOAT16_ROWS if dtype == torch.bfloat16 and _multiplies_bfloat16() else None


def _multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions and torch is not limited to AVX2."""
    is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_avx512 and torch.cpu._is_avx512_bf16_supported()


def _slots_by_shape(model: nn.Module) -> list[list[ModuleSlot[nn.Linear]]]:
    """The linears that can and should be packed, grouped by weight shape and dtype, the largest first."""
    groups = defaultdict[tuple[object, ...], list[ModuleSlot[nn.Linear]]](list)
    for slot in linear_slots(model):
        weight, bias = slot.module.weight, slot.module.bias
        is_supported = (
            weight.is_cpu and weight.dtype in DTYPES and (bias is None or bias.dtype == weight.dtype)
        )
        if is_supported and weight.numel() >= MINIMUM_NUMEL:
            groups[weight.shape, weight.dtype].append(slot)
    return sorted(groups.values(), key=lambda slots: -slots[0].module.weight.nbytes)
