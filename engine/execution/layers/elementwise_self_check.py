"""A trial of the compiled norm and gate on this machine, against the same in torch, in every dtype.

Law: what a compiler made wrongly is not used. Every formula and every path through a row is tried here, in
milliseconds.
"""

from collections.abc import Iterator

import torch

from engine.execution.layers.elementwise_operator import Activation, ElementwiseOperator, NormFormula
from engine.execution.machine.native_build import CannotBuild

LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""As a share of the size of a number, or of one for smaller ones. Sound ones differ by the order of a sum, by
the exponential's last places, and in bfloat16 where such a difference turns a rounding."""
SIZE = 3 * 64 + 45
"""Of a row: whole rounds of the loop over vectors, single vectors and a rest, however wide a vector is."""
FORMULAS = (NormFormula(1e-5, 0.0, True), NormFormula(1e-5, 0.0, False), NormFormula(1e-6, 1.0, False))
ROW_COUNTS = (1, 300)
"""By one thread, and by all."""

Outputs = tuple[torch.Tensor | None, torch.Tensor]


def check_operator(operator: ElementwiseOperator) -> None:
    """Raise `CannotBuild` unless both kernels agree."""
    for dtype, most in LARGEST_DIFFERENCE.items():
        for ours, theirs in _both_ways(operator, dtype):
            if ours is None or not torch.allclose(ours, theirs, rtol=most, atol=most):
                raise CannotBuild(f"what was compiled disagrees with torch in {dtype} on this machine")


def _both_ways(operator: ElementwiseOperator, dtype: torch.dtype) -> Iterator[Outputs]:
    generator = torch.Generator().manual_seed(0)
    for num_rows in ROW_COUNTS:
        # A row's numbers stand among others', as parts of a fused product do.
        wide = 4 * torch.randn(num_rows, 2 * SIZE + 1, generator=generator)
        left, right = wide.to(dtype)[:, :SIZE], wide.to(dtype)[:, SIZE + 1 :]
        weight = torch.randn(SIZE, generator=generator).to(dtype)
        for formula in FORMULAS:
            yield operator.norm(formula, weight)(left), formula.of(left, weight)
        for activation in Activation:
            yield operator.gate(activation)(left, right), activation.of(left) * right
