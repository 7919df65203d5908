"""The native operator of linears as functions of Python: hands shapes and pointers over.

Law: the operator checks nothing, so it is done here. A row's bits follow from the row and the weight alone:
not from the rows beside it, nor from the number of threads.

How a weight is packed and multiplied stands in `native/linear.cpp`.
"""

import ctypes
from typing import NamedTuple

import torch

from engine.errors import UnsupportedModel
from engine.execution.machine.memory import HugePageAllocator, dense
from engine.execution.machine.native_library import DTYPES, NativeLibrary

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] in the order in which the operator reads it."""

    panels: torch.Tensor
    num_inputs: int
    num_outputs: int


class LinearOperator:
    """The functions of `native/linear.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        multiply = [_pointer, _int64, _int64, _pointer, _int64, _int64, *[_pointer] * 2, _int64, _pointer]
        pack = [_pointer, _int64, _int64, _int64, _pointer, _int64, _pointer]
        self._multiply = {
            dtype: library.function(f"tokenmill_linear_{name}", multiply, ctypes.c_int)
            for dtype, name in DTYPES.items()
        }
        self._pack = {
            dtype: library.function(f"tokenmill_pack_linear_{name}", pack, None)
            for dtype, name in DTYPES.items()
        }
        self._numbers = {
            dtype: library.function(f"tokenmill_linear_numbers_{name}", [_int64] * 2, _int64)
            for dtype, name in DTYPES.items()
        }
        self._run_team = library.run_team
        self._pages = HugePageAllocator()

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """`weight` [outputs, inputs]. Raises `UnsupportedModel` for what the operator does not take."""
        if not weight.is_cpu or weight.dtype not in DTYPES:
            raise UnsupportedModel(f"the native linear takes no weights of {weight.dtype} on {weight.device}")
        num_outputs, num_inputs = weight.shape
        weight = dense(weight)
        panels = self._pages.zeros(self._numbers[weight.dtype](num_inputs, num_outputs), weight.dtype)
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

        Raises `UnsupportedModel` for what the weight was not packed for, which would be read past its end.
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
            raise MemoryError("the native linear got no memory for its rows")
        return out
