"""The native norm and gate as functions of Python, and the same in torch for what they do not take.

Law: the library checks nothing, so what does not fit is refused here, by giving None. The structures are
those of `native/elementwise.cpp`, field by field. A call costs a few microseconds, as a step makes a hundred:
what does not change is written down once.
"""

import ctypes
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, silu

from engine.execution.machine.memory import dense
from engine.execution.machine.native_library import DTYPES, NativeLibrary

_pointer, _int64, _float, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class Activation(Enum):
    """By the numbers that the library has for them."""

    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """As torch computes it."""
        if self is Activation.SILU:
            return silu(tensor)
        return gelu(tensor, approximate="tanh" if self is Activation.GELU_TANH else "none")


class NormFormula(NamedTuple):
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last dimension, in float32.

    `rounds_first`: the row is rounded to its dtype before it is multiplied with the weight, as well as after.
    """

    epsilon: float
    offset: float
    rounds_first: bool

    def of(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As torch computes it: the steps of transformers' modules, one by one."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.rounds_first:
            normed = normed.to(hidden.dtype)
        return (self.scale(weight) * normed).to(hidden.dtype)

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        """What a row is multiplied with, in float32."""
        return weight.float() + self.offset if self.offset else weight.float()


class _Norm(ctypes.Structure):
    """`TokenmillNorm`."""

    _fields_ = (
        ("scale", _pointer),
        ("size", _int64),
        ("run_team", _pointer),
        ("epsilon", _float),
        ("rounds_first", _int32),
    )


class _Gate(ctypes.Structure):
    """`TokenmillGate`."""

    _fields_ = (("run_team", _pointer), ("activation", _int64))


class ElementwiseOperator:
    """The functions of `native/elementwise.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        self._run_team = library.run_team
        self._norms = _by_dtype(
            library, "tokenmill_norm", [ctypes.POINTER(_Norm), *[_pointer] * 2, *[_int64] * 5]
        )
        self._gates = _by_dtype(
            library, "tokenmill_gate", [ctypes.POINTER(_Gate), *[_pointer] * 3, *[_int64] * 5]
        )

    def norm(self, formula: NormFormula, weight: torch.Tensor) -> "NativeNorm":
        """`weight` [size] of a dtype in `DTYPES`; later changes of it go unseen."""
        scale = formula.scale(weight.detach()).contiguous()
        about = _Norm(
            scale=scale.data_ptr(),
            size=len(scale),
            run_team=self._run_team,
            epsilon=formula.epsilon,
            rounds_first=formula.rounds_first,
        )
        return NativeNorm(self._norms[weight.dtype], about, scale, weight.dtype)

    def gate(self, activation: Activation) -> "NativeGate":
        return NativeGate(self._gates, _Gate(run_team=self._run_team, activation=activation.value))


class NativeNorm:
    """One norm, with its weight."""

    def __init__(
        self, function: Callable[..., None], about: _Norm, scale: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._function = function
        # Keeps the structure alive, and the structure names the scale.
        self._about = ctypes.byref(about)
        self._scale = scale
        self._size = len(scale)
        self._dtype = dtype

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """`hidden` [..., size] of any strides -> the same, contiguous; None if it is of another kind."""
        size = self._size
        if hidden.dtype is not self._dtype or hidden.shape[-1] != size or not hidden.is_cpu:
            return None
        out = hidden.new_empty(hidden.shape)
        if hidden.is_contiguous():
            outer, inner, outer_stride, inner_stride = 1, hidden.numel() // size, 0, size
        else:
            # A view for heads within a fused product, and for heads before rows.
            hidden = dense(hidden.reshape(-1, hidden.shape[-2] if hidden.dim() > 1 else 1, size))
            outer, inner, _ = hidden.shape
            outer_stride, inner_stride, _ = hidden.stride()
        self._function(
            self._about,
            hidden.data_ptr(),
            out.data_ptr(),
            outer,
            inner,
            outer_stride,
            inner_stride,
            torch.get_num_threads(),
        )
        return out


class NativeGate:
    """activation(gate) * up."""

    def __init__(self, functions: dict[torch.dtype, Callable[..., None]], about: _Gate) -> None:
        self._functions = functions
        self._about = ctypes.byref(about)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
        """Both [..., size], of any strides -> the same, contiguous; None if they are of another kind."""
        function = self._functions.get(gate.dtype)
        if function is None or up.dtype is not gate.dtype or up.shape != gate.shape:
            return None
        if not (gate.is_cpu and up.is_cpu):
            return None
        size = gate.shape[-1]
        out = gate.new_empty(gate.shape)
        gate, up = _rows(gate), _rows(up)
        function(
            self._about,
            gate.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            out.numel() // size,
            size,
            gate.stride(-2),
            up.stride(-2),
            torch.get_num_threads(),
        )
        return out


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., size] as rows that stand one stride apart: mostly they do, and reshaping takes a microsecond."""
    if tensor.dim() < 2 or tensor.shape[:-2].numel() != 1:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return dense(tensor)


def _by_dtype(
    library: NativeLibrary, name: str, arguments: list[object]
) -> dict[torch.dtype, Callable[..., None]]:
    return {dtype: library.function(f"{name}_{word}", arguments, None) for dtype, word in DTYPES.items()}
