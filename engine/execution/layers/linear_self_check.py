"""A trial of the compiled operator of linears on this machine, against torch, in every dtype that it has.

Law: what a compiler made wrongly is not used.
"""

import torch
from torch.nn.functional import linear

from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.machine.native_build import CannotBuild

LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of numbers of about size one; sound ones differ by 1e-6, and by the rounding of bfloat16."""
SIZES = ((64, 48), (700, 37), (129, 200))
"""Inputs and outputs: more and fewer than are multiplied in one go, even and odd."""
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 64, 200)


def check_linears(operator: LinearOperator) -> None:
    """Raise `CannotBuild` unless both kernels agree."""
    generator = torch.Generator().manual_seed(0)
    for dtype, most in LARGEST_DIFFERENCE.items():
        for num_inputs, num_outputs in SIZES:
            hidden = torch.randn(max(ROW_COUNTS), num_inputs, generator=generator).to(dtype)
            weight = (torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
            bias = torch.randn(num_outputs, generator=generator).to(dtype)
            right = linear(hidden.double(), weight.double(), bias.double())
            packed = operator.pack(weight)
            for num_rows in ROW_COUNTS:
                found = operator.multiply(hidden[:num_rows], packed, bias)
                difference = float((found - right[:num_rows]).abs().max())
                # NaN is not within the bound either.
                if not difference <= most:
                    raise CannotBuild(
                        f"the compiled linears disagree with torch by {difference:.2g} in {dtype} on this"
                        " machine"
                    )
