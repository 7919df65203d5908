"""Loads the library of native operators and calls its functions through ctypes.

The library checks nothing: callers refuse what does not fit its C interface. The GIL is released during a
call.

The library does not use torch's extension interface: with torch's headers it compiles for a minute instead of
seconds, and the result depends on torch's version. A ctypes call takes a few microseconds per layer.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.execution.machine.native_build import CannotBuild, build, built_library, find_compiler

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes of the operators, and the suffixes of their functions' names."""
POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def fields(ctype: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a `ctypes.Structure` that share a type. `names`: separated by spaces."""
    return tuple((name, ctype) for name in names.split())


class NativeLibrary:
    """The library at `path`. Raises `CannotBuild` if it cannot be loaded.

    `run_team`: address of the function that runs work on torch's threads.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise CannotBuild(f"{path} cannot be loaded: {error}") from error
        self._path = path
        self.run_team = _torch_team()
        self._recorded: list[Callable[[], Any]] | None = None

    def function(self, name: str, arguments: list[Any], result: Any = None) -> Callable[..., Any]:
        """The C function `name`. Raises `CannotBuild` if the library lacks it.

        A function without a result, or with an int that is 0 on success, is called for what it writes.
        """
        try:
            function = self._library[name]
        except AttributeError as error:
            raise CannotBuild(f"{self._path} has no {name}: {error}") from error
        function.argtypes, function.restype = arguments, result
        writes = result in (None, ctypes.c_int)

        def call(*values: Any) -> Any:
            if self._recorded is None or not writes:
                return function(*values)
            self._recorded.append(partial(function, *values))
            return 0

        return call

    def by_dtype(
        self, name: str, arguments: list[Any], result: Any = None
    ) -> dict[torch.dtype, Callable[..., Any]]:
        """The variants of the C function `name` for each of `DTYPES`."""
        return {
            dtype: self.function(f"{name}_{suffix}", arguments, result) for dtype, suffix in DTYPES.items()
        }

    @contextmanager
    def recording(self, calls: list[Callable[[], Any]]) -> Iterator[None]:
        """Append each call of a function that writes to `calls` instead of making it.

        Outputs are not written. The caller keeps the memory of the calls alive until it makes them.
        """
        self._recorded = calls
        try:
            yield
        finally:
            self._recorded = None


def find_library(
    cache_directory: Path | None, progress: Callable[[str], None]
) -> NativeLibrary | CannotBuild:
    """The library for this machine, compiled on first use, or the reason why there is none."""
    if cache_directory is None:
        return CannotBuild("there is no cache directory to compile it into")
    try:
        return load_library(cache_directory, progress)
    except CannotBuild as error:
        return error


def load_library(cache_directory: Path, progress: Callable[[str], None]) -> NativeLibrary:
    """The library for this machine, compiled on first use. Raises `CannotBuild`."""
    path = built_library(cache_directory, progress)
    try:
        return NativeLibrary(path)
    except CannotBuild as error:
        # Complete, but built on another machine whose CPU reports the same features.
        progress(f"{error}; compiling it again")
    build(find_compiler(), path, progress)
    return NativeLibrary(path)


def _torch_team() -> int:
    """The address of GOMP_parallel in the OpenMP runtime of torch, whose threads the operators share.

    torch loads its runtime with global symbols, and LLVM's runtime exports the function too. A second runtime
    would put a second thread pool on the same cores.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError as error:
        raise CannotBuild("torch's OpenMP runtime, whose threads it would use, was not found") from error
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
