"""The native attention operator as functions of Python: hands shapes and pointers over.

Law: the operator checks nothing, so its callers do. The fields of `NativeCall` are those of
`native/attention.cpp`, one by one.
"""

import ctypes

import torch

from engine.execution.attention.interface import LayerSpec
from engine.execution.machine.native_library import DTYPES, NativeLibrary

GROUP = 16
"""Tokens that stand together in the pool."""
MOST_SIZE = 512
"""The largest head that the operator takes."""

_pointer, _int64, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeCall(ctypes.Structure):
    """`TokenmillCall` of `native/attention.cpp`, field by field."""

    _fields_ = (
        ("query", _pointer),
        ("key", _pointer),
        ("value", _pointer),
        ("out", _pointer),
        ("pool", _pointer),
        ("sinks", _pointer),
        ("slot_mapping", _pointer),
        ("spans", _pointer),
        ("tables", _pointer),
        ("query_strides", _int64 * 2),
        ("key_strides", _int64 * 2),
        ("value_strides", _int64 * 2),
        ("num_rows", _int64),
        ("num_spans", _int64),
        ("num_heads", _int64),
        ("num_kv_heads", _int64),
        ("head_dim", _int64),
        ("value_dim", _int64),
        ("block_size", _int64),
        ("window", _int64),
        ("threads", _int64),
        ("run_team", _pointer),
        ("scaling", _float),
        ("softcap", _float),
    )


class AttentionOperator:
    """The functions of `native/attention.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        call = [ctypes.POINTER(NativeCall)]
        slot_mapping = [_pointer, _pointer, *[_int64] * 4]
        self._attend = {
            dtype: library.function(f"tokenmill_attend_{name}", call, ctypes.c_int)
            for dtype, name in DTYPES.items()
        }
        self._forget = {
            dtype: library.function(f"tokenmill_forget_{name}", slot_mapping, None)
            for dtype, name in DTYPES.items()
        }
        self._group_numbers = library.function("tokenmill_group_numbers", [_int64] * 3, _int64)
        self.run_team = library.run_team

    def forward(self, dtype: torch.dtype, call: NativeCall) -> None:
        if self._attend[dtype](ctypes.byref(call)) != 0:
            raise MemoryError("the native attention got no memory for its plan")

    def forget(self, pool: torch.Tensor, slot_mapping: torch.Tensor, spec: LayerSpec) -> None:
        """Set to 0 what `slot_mapping` (int64) of a layer's pool hold."""
        self._forget[pool.dtype](
            pool.data_ptr(),
            slot_mapping.data_ptr(),
            len(slot_mapping),
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_dim,
        )

    def group_numbers(self, spec: LayerSpec) -> int:
        """Numbers that `GROUP` tokens take in a layer's pool."""
        return int(self._group_numbers(spec.num_kv_heads, spec.head_dim, spec.value_dim))
