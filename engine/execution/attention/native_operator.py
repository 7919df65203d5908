"""The native attention operator, called through ctypes. It checks nothing; its callers do."""

import ctypes

import torch

from engine.execution.attention.interface import LayerSpec
from engine.execution.machine.native_library import FLOAT, INT64, POINTER, NativeLibrary, fields

GROUP = 16
"""Tokens of a group in the KV pool."""
MAX_HEAD_DIM = 512


class NativeCall(ctypes.Structure):
    """`TokenmillCall` of `native/attention.cpp`, field by field."""

    _fields_ = (
        *fields(POINTER, "query key value out pool sinks slot_mapping spans tables"),
        *fields(INT64 * 2, "query_strides key_strides value_strides"),
        *fields(INT64, "num_rows num_spans num_heads num_kv_heads head_dim value_dim block_size"),
        *fields(INT64, "window threads"),
        *fields(POINTER, "run_team"),
        *fields(FLOAT, "scaling softcap"),
    )


class AttentionOperator:
    """The functions of `native/attention.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        self._attend = library.by_dtype("tokenmill_attend", [ctypes.POINTER(NativeCall)], ctypes.c_int)
        self._zero = library.by_dtype("tokenmill_zero", [POINTER, POINTER, *[INT64] * 4])
        self._group_numel = library.function("tokenmill_group_numel", [INT64] * 3, INT64)
        self.run_team = library.run_team

    def forward(self, dtype: torch.dtype, call: NativeCall) -> None:
        if self._attend[dtype](ctypes.byref(call)) != 0:
            raise MemoryError("the native attention could not allocate memory")

    def zero(self, pool: torch.Tensor, slot_mapping: torch.Tensor, spec: LayerSpec) -> None:
        """Zero the slots `slot_mapping` (int64) of a layer's pool."""
        sizes = (len(slot_mapping), spec.num_kv_heads, spec.head_dim, spec.value_dim)
        self._zero[pool.dtype](pool.data_ptr(), slot_mapping.data_ptr(), *sizes)

    def group_numel(self, spec: LayerSpec) -> int:
        """Elements of `GROUP` tokens in a layer's pool."""
        return int(self._group_numel(spec.num_kv_heads, spec.head_dim, spec.value_dim))
