"""The native operators as functions of Python: loads the library and hands pointers over.

Law: what does not fit the C interface is refused here or in the backend, never passed on; the library checks
nothing. The functions are called through ctypes, which lets other threads of Python run meanwhile.

Why not torch's extensions: with its headers the same source compiles for a minute instead of seconds, and
the result depends on torch's version. What remains is one call a layer, of a few microseconds.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engine.execution.attention import LayerSpec
from engine.execution.native_build import CannotBuild, build, built_library, find_compiler

GROUP = 16
"""Tokens that stand together in the pool."""
MOST_SIZE = 512
"""The largest head that the operator takes."""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

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
        ("slots", _pointer),
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


class NativeLibrary:
    """The library at `path`. Raises `CannotBuild` if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._attend = {dtype: library[f"tokenmill_attend_{name}"] for dtype, name in DTYPES.items()}
            self._forget = {dtype: library[f"tokenmill_forget_{name}"] for dtype, name in DTYPES.items()}
            self._group_numbers = library.tokenmill_group_numbers
        except (OSError, AttributeError) as error:
            raise CannotBuild(f"{path} cannot be loaded: {error}") from error
        for attend in self._attend.values():
            attend.argtypes, attend.restype = [ctypes.POINTER(NativeCall)], ctypes.c_int
        for forget in self._forget.values():
            forget.argtypes, forget.restype = [_pointer, _pointer, *[_int64] * 4], None
        self._group_numbers.argtypes, self._group_numbers.restype = [_int64] * 3, _int64
        self.run_team = _torch_team()

    def attend(self, dtype: torch.dtype, call: NativeCall) -> None:
        if self._attend[dtype](ctypes.byref(call)) != 0:
            raise MemoryError("the native attention got no memory for its plan")

    def forget(self, pool: torch.Tensor, slots: torch.Tensor, spec: LayerSpec) -> None:
        """Set to 0 what `slots` (int64) of a layer's pool hold."""
        self._forget[pool.dtype](
            pool.data_ptr(), slots.data_ptr(), len(slots), spec.num_kv_heads, spec.head_dim, spec.value_dim
        )

    def group_numbers(self, spec: LayerSpec) -> int:
        """Numbers that `GROUP` tokens take in a layer's pool."""
        return int(self._group_numbers(spec.num_kv_heads, spec.head_dim, spec.value_dim))


def load_library(cache_directory: Path, progress: Callable[[str], None]) -> NativeLibrary:
    """The library for this machine, built on first use. Raises `CannotBuild`."""
    path = built_library(cache_directory, progress)
    try:
        return NativeLibrary(path)
    except CannotBuild as error:
        # Whole, but from another machine whose CPU looks the same.
        progress(f"{error}; it is made again")
    build(find_compiler(), path, progress)
    return NativeLibrary(path)


def _torch_team() -> int:
    """The address of GOMP_parallel in the OpenMP runtime that torch uses: its threads do our work too.

    torch loads its runtime for all to see, and LLVM's runtime has the function as well. A runtime of our own
    would be a second pool of threads on the same cores.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError as error:
        raise CannotBuild("torch's OpenMP runtime, whose threads it would use, was not found") from error
    address = ctypes.cast(function, _pointer).value
    assert address is not None
    return address
