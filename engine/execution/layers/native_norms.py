"""Replaces RMS norms with the native operator.

A norm is recognised by its results, not its name: in the model's dtype, on random rows of several scales, its
output equals a formula's bit for bit. Other modules are left alone. A replaced norm keeps its weight; results
differ by rounding, and the bits of a row do not depend on the other rows.
"""

from collections.abc import Iterator

import torch
from torch import nn

from engine.execution.layers.elementwise_operator import ElementwiseOperator, NormFormula
from engine.execution.layers.module_slots import ObservedSlot
from engine.execution.machine.native_library import DTYPES

SCALES = (1e-3, 1.0, 1e3)
"""Of the rows that are compared. The smallest reveals epsilon, the largest a clamp."""
KINDS = ((0.0, True), (0.0, False), (1.0, False))
"""`offset` and `rounds_first` of Llama, gpt-oss and Gemma."""


class NativeRMSNorm(nn.Module):
    """A norm of `formula` with `weight` [size]. torch computes what the operator does not support."""

    def __init__(self, operator: ElementwiseOperator, formula: NormFormula, weight: nn.Parameter) -> None:
        super().__init__()
        self.formula = formula
        self.weight = weight
        self._native = operator.norm(formula, weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., size] -> the same shape."""
        normed = self._native(hidden)
        return self.formula.reference(hidden, self.weight) if normed is None else normed


def use_native_norms(slots: list[ObservedSlot], operator: ElementwiseOperator) -> int:
    """Replace the norms in `slots`. Returns their number."""
    num_norms = 0
    for observed in slots:
        weight = _only_weight(observed)
        if weight is not None and (formula := _find_formula(observed, weight)) is not None:
            observed.slot.replace(NativeRMSNorm(operator, formula, weight))
            num_norms += 1
    return num_norms


def _only_weight(observed: ObservedSlot) -> nn.Parameter | None:
    """The module's only parameter, if it is a vector as long as the observed rows; else None."""
    module = observed.module
    weights, buffers = list(module.parameters()), list(module.buffers())
    if len(weights) != 1 or buffers or len(list(module.modules())) > 1:
        return None
    (weight,) = weights
    fits = weight.shape == observed.shape[-1:] and weight.dtype == observed.dtype and weight.dtype in DTYPES
    return weight if fits else None


def _find_formula(observed: ObservedSlot, weight: nn.Parameter) -> NormFormula | None:
    """The first formula that reproduces the module's outputs, or None."""
    with torch.inference_mode():
        samples = observed.samples(SCALES)
        outputs = [observed.module(sample.clone()) for sample in samples]
        for formula in _candidates(observed.module):
            expected = (formula.reference(sample, weight) for sample in samples)
            if all(map(_same_bits, outputs, expected)):
                return formula
    return None


def _candidates(module: nn.Module) -> Iterator[NormFormula]:
    """Formulas with each float attribute of the module as epsilon."""
    for value in list(vars(module).values()):
        if isinstance(value, float):
            for offset, rounds_first in KINDS:
                yield NormFormula(value, offset, rounds_first)


def _same_bits(left: object, right: torch.Tensor) -> bool:
    return isinstance(left, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
