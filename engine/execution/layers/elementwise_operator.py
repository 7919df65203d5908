"""Native RMS norm, gated activation and rotary embedding, called through ctypes.

The library checks nothing, so these functions return None for tensors that it does not support. The
structures match `native/elementwise.cpp` field by field. Arguments that do not change between calls are
converted once: a step makes about a hundred calls of a few microseconds.
"""

import ctypes
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, silu

from engine.execution.machine.memory import dense
from engine.execution.machine.native_library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    fields,
)
from engine.execution.machine.self_check import check_close, seeded_randn

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the self-check. The order of a sum, the last bits of exp and, in bfloat16, a flipped rounding differ."""
CHECKED_SIZE = 3 * 64 + 45
"""Elements of a row: whole iterations of the vector loop, single vectors and a remainder at any width."""
CHECKED_ROWS = (1, 300)
"""Computed by one thread, and by all."""


class Activation(Enum):
    """Activations of gated MLPs. The values are those of the library."""

    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2

    def reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """The activation as torch computes it."""
        if self is Activation.SILU:
            return silu(tensor)
        return gelu(tensor, approximate="tanh" if self is Activation.GELU_TANH else "none")


class NormFormula(NamedTuple):
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last dimension, in float32.

    `rounds_first`: the normalised row is rounded to its dtype before it is multiplied by the weight.
    """

    epsilon: float
    offset: float
    rounds_first: bool

    def reference(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The norm in torch, in the steps of transformers' modules."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.rounds_first:
            normed = normed.to(hidden.dtype)
        return (self.scale(weight) * normed).to(hidden.dtype)

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        """weight + offset, in float32."""
        return weight.float() + self.offset if self.offset else weight.float()


FORMULAS = (NormFormula(1e-5, 0.0, True), NormFormula(1e-5, 0.0, False), NormFormula(1e-6, 1.0, False))
"""Checked by the self-check: the kinds that `native_norms` recognises."""


class _Norm(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "scale"),
        *fields(INT64, "size"),
        *fields(POINTER, "run_team"),
        *fields(FLOAT, "epsilon"),
        *fields(INT32, "rounds_first"),
    )


class _Gate(ctypes.Structure):
    _fields_ = (*fields(POINTER, "run_team"), *fields(INT64, "activation"))


class _Rotary(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "query key cosine sine out"),
        *fields(INT64 * 2, "query_strides key_strides angle_strides"),
        *fields(INT64, "num_rows num_heads num_kv_heads size threads"),
        *fields(POINTER, "run_team"),
    )


class ElementwiseOperator:
    """The functions of `native/elementwise.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        self._run_team = library.run_team
        self._norms = library.by_dtype(
            "tokenmill_norm", [ctypes.POINTER(_Norm), *[POINTER] * 2, *[INT64] * 5]
        )
        self._gates = library.by_dtype(
            "tokenmill_gate", [ctypes.POINTER(_Gate), *[POINTER] * 3, *[INT64] * 5]
        )
        self._rotate = library.by_dtype("tokenmill_rotate", [ctypes.POINTER(_Rotary)])

    def norm(self, formula: NormFormula, weight: torch.Tensor) -> "NativeNorm":
        """A norm with `weight` [size] of one of `DTYPES`. Later changes of the weight have no effect."""
        scale = formula.scale(weight.detach()).contiguous()
        config = _Norm(
            scale=scale.data_ptr(),
            size=len(scale),
            run_team=self._run_team,
            epsilon=formula.epsilon,
            rounds_first=formula.rounds_first,
        )
        return NativeNorm(self._norms[weight.dtype], config, scale, weight.dtype)

    def gate(self, activation: Activation) -> "NativeGate":
        return NativeGate(self._gates, _Gate(run_team=self._run_team, activation=activation.value))

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """x * cosine + cat(-x2, x1) * sine for `query` and `key`, where x1 and x2 are the halves of x.

        `query` and `key` [1, heads, rows, size], `cosine` and `sine` [1, rows, size]; returns the shapes of
        `query` and `key`, or None for tensors that are not supported.
        """
        if not _can_rotate(query, key, cosine, sine):
            return None
        _, num_heads, num_rows, size = query.shape
        num_kv_heads = key.shape[1]
        out = query.new_empty(num_rows, num_heads + num_kv_heads, size)
        query, key, cosine, sine = (dense(one) for one in (query, key, cosine, sine))
        call = _Rotary(
            query=query.data_ptr(),
            key=key.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            out=out.data_ptr(),
            query_strides=(query.stride(2), query.stride(1)),
            key_strides=(key.stride(2), key.stride(1)),
            angle_strides=(cosine.stride(1), sine.stride(1)),
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            size=size,
            threads=torch.get_num_threads(),
            run_team=self._run_team,
        )
        self._rotate[out.dtype](ctypes.byref(call))
        heads_first = out.transpose(0, 1).unsqueeze(0)
        return heads_first[:, :num_heads], heads_first[:, num_heads:]


class NativeNorm:
    """One norm with its weight."""

    def __init__(
        self, function: Callable[..., None], config: _Norm, scale: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._function = function
        # The reference keeps the structure alive; the structure contains the address of `scale`.
        self._config = ctypes.byref(config)
        self._scale = scale
        self._size = len(scale)
        self._dtype = dtype

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """`hidden` [..., size] of any strides -> the same shape, contiguous; None if not supported."""
        size = self._size
        if hidden.dtype is not self._dtype or hidden.shape[-1] != size or not hidden.is_cpu:
            return None
        out = hidden.new_empty(hidden.shape)
        if hidden.is_contiguous():
            outer, inner, outer_stride, inner_stride = 1, hidden.numel() // size, 0, size
        else:
            # A view of the heads within a fused product, or of heads before rows.
            hidden = dense(hidden.reshape(-1, hidden.shape[-2] if hidden.dim() > 1 else 1, size))
            outer, inner, _ = hidden.shape
            outer_stride, inner_stride, _ = hidden.stride()
        self._function(
            self._config,
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

    def __init__(self, functions: dict[torch.dtype, Callable[..., None]], config: _Gate) -> None:
        self._functions = functions
        self._config = ctypes.byref(config)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
        """Both [..., size] of any strides -> the same shape, contiguous; None if not supported."""
        function = self._functions.get(gate.dtype)
        if function is None or up.dtype is not gate.dtype or up.shape != gate.shape:
            return None
        if not (gate.is_cpu and up.is_cpu):
            return None
        size = gate.shape[-1]
        out = gate.new_empty(gate.shape)
        gate, up = _rows(gate), _rows(up)
        function(
            self._config,
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
    """[..., size] as rows of one stride. Reshaping takes a microsecond and is rarely needed."""
    if tensor.dim() < 2 or tensor.shape[:-2].numel() != 1:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return dense(tensor)


def _can_rotate(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
    if query.dim() != 4 or key.dim() != 4 or not query.is_cpu or query.dtype not in DTYPES:
        return False
    batch, _, num_rows, size = query.shape
    same_dtype = query.dtype == key.dtype == cosine.dtype == sine.dtype
    shapes_fit = key.shape[2:] == (num_rows, size) and cosine.shape == sine.shape == (1, num_rows, size)
    return batch == len(key) == 1 and size % 2 == 0 and same_dtype and shapes_fit


def check_elementwise(operator: ElementwiseOperator) -> None:
    """Compare norms and gates with torch in every dtype. Raises `CannotBuild` if they disagree.

    Rotations are compared with the function that they replace, in `native_rotary`.
    """
    for dtype, tolerance in TOLERANCES.items():
        for name, found, expected in _results(operator, dtype):
            check_close(name, found, expected, tolerance)


def _results(
    operator: ElementwiseOperator, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
    """What is compared: the operator's name, its output, and torch's."""
    randn = seeded_randn()
    for num_rows in CHECKED_ROWS:
        # Views into wider rows, as the parts of a fused product are.
        wide = (4 * randn(num_rows, 2 * CHECKED_SIZE + 1)).to(dtype)
        left, right = wide[:, :CHECKED_SIZE], wide[:, CHECKED_SIZE + 1 :]
        weight = randn(CHECKED_SIZE, dtype=dtype)
        for formula in FORMULAS:
            yield "norm", operator.norm(formula, weight)(left), formula.reference(left, weight)
        for activation in Activation:
            yield "gate", operator.gate(activation)(left, right), activation.reference(left) * right
