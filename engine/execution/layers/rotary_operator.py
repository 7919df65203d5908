"""The native rotary embedding as a function of Python.

Law: the library checks nothing, so what does not fit is refused here, by giving None. The fields of `_Rotary`
are those of `native/rotary.cpp`, one by one.
"""

import ctypes

import torch

from engine.execution.machine.memory import dense
from engine.execution.machine.native_library import DTYPES, NativeLibrary

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Rotary(ctypes.Structure):
    """`TokenmillRotary`."""

    _fields_ = (
        ("query", _pointer),
        ("key", _pointer),
        ("cosine", _pointer),
        ("sine", _pointer),
        ("out", _pointer),
        ("query_strides", _int64 * 2),
        ("key_strides", _int64 * 2),
        ("angle_strides", _int64 * 2),
        ("num_rows", _int64),
        ("num_heads", _int64),
        ("num_kv_heads", _int64),
        ("size", _int64),
        ("threads", _int64),
        ("run_team", _pointer),
    )


class RotaryOperator:
    """The functions of `native/rotary.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        call = [ctypes.POINTER(_Rotary)]
        self._rotate = {
            dtype: library.function(f"tokenmill_rotate_{name}", call, None) for dtype, name in DTYPES.items()
        }
        self._run_team = library.run_team

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """x * cosine + cat(-x2, x1) * sine, where x1 and x2 are the halves of x, for `query` and for `key`.

        Both [1, heads, rows, size]; `cosine` and `sine` [1, rows, size] -> as they were; None for anything
        else.
        """
        if not _fits(query, key, cosine, sine):
            return None
        _, num_heads, num_rows, size = query.shape
        num_kv_heads = key.shape[1]
        out = query.new_empty(num_rows, num_heads + num_kv_heads, size)
        query, key, cosine, sine = (dense(one) for one in (query, key, cosine, sine))
        asked = _Rotary(
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
        self._rotate[out.dtype](ctypes.byref(asked))
        heads_first = out.transpose(0, 1).unsqueeze(0)
        return heads_first[:, :num_heads], heads_first[:, num_heads:]


def _fits(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
    if query.dim() != 4 or key.dim() != 4 or not query.is_cpu or query.dtype not in DTYPES:
        return False
    batch, _, num_rows, size = query.shape
    is_one_kind = query.dtype == key.dtype == cosine.dtype == sine.dtype
    shapes_fit = key.shape[2:] == (num_rows, size) and cosine.shape == sine.shape == (1, num_rows, size)
    return batch == len(key) == 1 and size % 2 == 0 and is_one_kind and shapes_fit
