"""RMS norms are computed by the native operator, where a module is seen to be one.

Law: a module is a norm by what it does and not by its name: in the model's dtype, on random rows of several
sizes, its output is that of a formula to the last bit. Anything else is left alone. The weight keeps its
place in the module tree. Results differ by rounding only, and a row's bits do not depend on the rows beside
it.
"""

from collections.abc import Iterator

import torch
from torch import nn

from engine.execution.layers.elementwise_operator import ElementwiseOperator, NormFormula
from engine.execution.layers.module_slots import SeenPlace
from engine.execution.machine.native_library import DTYPES

SCALES = (1e-3, 1.0, 1e3)
"""Of the rows that are tried. The smallest shows the epsilon, the largest a bound."""
KINDS = ((0.0, True), (0.0, False), (1.0, False))
"""Offset of the weight, and whether a row is rounded before it is weighed: Llama's, gpt-oss', Gemma's."""


class NativeRMSNorm(nn.Module):
    """A norm of `formula` with `weight` [size]; what the operator does not take, torch computes."""

    def __init__(self, operator: ElementwiseOperator, formula: NormFormula, weight: nn.Parameter) -> None:
        super().__init__()
        self.formula = formula
        self.weight = weight
        self._native = operator.norm(formula, weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., size] -> the same."""
        normed = self._native(hidden)
        return self.formula.of(hidden, self.weight) if normed is None else normed


def use_native_norms(places: list[SeenPlace], operator: ElementwiseOperator) -> int:
    """Put fast norms where there are norms; gives how many."""
    num_norms = 0
    for place in places:
        weight = _only_weight(place)
        if weight is not None and (formula := _formula_of(place, weight)) is not None:
            place.put(NativeRMSNorm(operator, formula, weight))
            num_norms += 1
    return num_norms


def _only_weight(place: SeenPlace) -> nn.Parameter | None:
    """All that the module has besides numbers: one vector, as long as the rows that it was given."""
    weights, buffers = list(place.module.parameters()), list(place.module.buffers())
    if len(weights) != 1 or buffers or len(list(place.module.modules())) > 1:
        return None
    (weight,) = weights
    fits = weight.shape == place.shape[-1:] and weight.dtype == place.dtype and weight.dtype in DTYPES
    return weight if fits else None


def _formula_of(place: SeenPlace, weight: nn.Parameter) -> NormFormula | None:
    """The first that gives the module's outputs; None: it is something else."""
    with torch.inference_mode():
        probes = place.probes(SCALES)
        outputs = [place.module(probe.clone()) for probe in probes]
        for formula in _formulas(place.module):
            theirs = (formula.of(probe, weight) for probe in probes)
            if all(map(_same_bits, outputs, theirs)):
                return formula
    return None


def _formulas(module: nn.Module) -> Iterator[NormFormula]:
    """With each number that the module holds as its epsilon."""
    for value in list(vars(module).values()):
        if isinstance(value, float):
            for offset, rounds_first in KINDS:
                yield NormFormula(value, offset, rounds_first)


def _same_bits(left: object, right: torch.Tensor) -> bool:
    return isinstance(left, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
