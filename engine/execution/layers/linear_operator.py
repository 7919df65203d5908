"""The native operator of linears, called through ctypes, and its self-check.

The bits of a row depend on the row and the weight, not on the other rows or the number of threads.
`native/linear.cpp` describes how a weight is packed and multiplied.
"""

import ctypes
import logging
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.execution.machine.memory import HugePageAllocator, dense
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import DTYPES, INT64, POINTER, NativeLibrary
from engine.execution.machine.self_check import check_close, seeded_randn

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the self-check: correct results differ by about 1e-6, and by the rounding of bfloat16."""
CHECKED_SIZES = ((64, 48), (700, 37), (129, 200))
"""Inputs and outputs: fewer and more than one pass of the kernel multiplies, even and odd."""
CHECKED_ROWS = (1, 2, 3, 4, 5, 6, 7, 64, 200)

log = logging.getLogger(__name__)


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] in the layout of the operator."""

    panels: torch.Tensor
    num_inputs: int
    num_outputs: int


class LinearOperator:
    """The functions of `native/linear.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        multiply = [POINTER, INT64, INT64, POINTER, INT64, INT64, *[POINTER] * 2, INT64, POINTER]
        pack = [POINTER, INT64, INT64, INT64, POINTER, INT64, POINTER]
        self._multiply = library.by_dtype("tokenmill_linear", multiply, ctypes.c_int)
        self._pack = library.by_dtype("tokenmill_pack_linear", pack)
        self._numel = library.by_dtype("tokenmill_linear_numel", [INT64] * 2, INT64)
        self._run_team = library.run_team
        self._allocator = HugePageAllocator()

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack `weight` [outputs, inputs]. Raises `UnsupportedModel` for other dtypes and devices."""
        if not weight.is_cpu or weight.dtype not in DTYPES:
            raise UnsupportedModel(
                f"the native linear does not support weights of {weight.dtype} on {weight.device}"
            )
        num_outputs, num_inputs = weight.shape
        weight = dense(weight)
        panels = self._allocator.zeros(self._numel[weight.dtype](num_inputs, num_outputs), weight.dtype)
        self._pack[weight.dtype](
            weight.data_ptr(),
            weight.stride(0),
            num_inputs,
            num_outputs,
            panels.data_ptr(),
            torch.get_num_threads(),
            self._run_team,
        )
        return PackedWeight(panels, num_inputs, num_outputs)

    def multiply(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """`hidden` [..., inputs], `bias` [outputs] -> [..., outputs].

        Raises `UnsupportedModel` if `hidden` does not match the weight, which would be read out of bounds.
        """
        panels, num_inputs, num_outputs = weight
        if hidden.dtype != panels.dtype or hidden.shape[-1] != num_inputs or not hidden.is_cpu:
            raise UnsupportedModel(
                f"a linear of {panels.dtype} with {num_inputs} inputs got {hidden.dtype} {list(hidden.shape)}"
                f" on {hidden.device}"
            )
        out = hidden.new_empty(*hidden.shape[:-1], num_outputs)
        if num_inputs == 0 or not out.numel():
            return out.zero_() if bias is None else out.copy_(bias)
        if hidden.is_contiguous():
            rows, stride = hidden, num_inputs
        else:
            rows = dense(hidden.reshape(-1, num_inputs))
            stride = rows.stride(0)
        failed = self._multiply[panels.dtype](
            rows.data_ptr(),
            stride,
            hidden.numel() // num_inputs,
            panels.data_ptr(),
            num_inputs,
            num_outputs,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
            self._run_team,
        )
        if failed:
            raise MemoryError("the native linear could not allocate memory for its rows")
        return out


def checked_linear_operator(library: NativeLibrary | None) -> LinearOperator | None:
    """The operator of `library`; None without a library, or, with a warning, if the self-check fails."""
    if library is None:
        return None
    try:
        operator = LinearOperator(library)
        check_linears(operator)
    except CannotBuild as error:
        log.warning("linears are computed by torch, which is slower: %s", error)
        return None
    return operator


def check_linears(operator: LinearOperator) -> None:
    """Compare the operator with torch in every dtype. Raises `CannotBuild` if they disagree."""
    randn = seeded_randn()
    for dtype, tolerance in TOLERANCES.items():
        for num_inputs, num_outputs in CHECKED_SIZES:
            hidden = randn(max(CHECKED_ROWS), num_inputs, dtype=dtype)
            weight = (randn(num_outputs, num_inputs) * num_inputs**-0.5).to(dtype)
            bias = randn(num_outputs, dtype=dtype)
            expected = linear(hidden.double(), weight.double(), bias.double())
            packed = operator.pack(weight)
            for num_rows in CHECKED_ROWS:
                found = operator.multiply(hidden[:num_rows], packed, bias)
                check_close("linear", found, expected[:num_rows], tolerance)
