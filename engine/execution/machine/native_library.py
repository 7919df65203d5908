"""Loads the library of native operators, whose functions are called through ctypes.

Law: the library checks nothing, so what does not fit its C interface is refused before a call. While a
function runs, other threads of Python do too. Knows no operator.

Why not torch's extensions: with its headers the same source compiles for a minute instead of seconds, and
the result depends on torch's version. What remains is one call a layer, of a few microseconds.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.execution.machine.autotune_cache import AutotuneCache
from engine.execution.machine.native_build import (
    CannotBuild,
    build,
    built_library,
    cpu_facts,
    find_compiler,
    native_directory,
)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""In which operators come, and how their functions' names end."""


class NativeLibrary:
    """The library at `path`. Raises `CannotBuild` if it cannot be loaded.

    `name`: says what it was made of. `run_team`: see `_torch_team`.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise CannotBuild(f"{path} cannot be loaded: {error}") from error
        self._path = path
        self.name = path.stem
        self.run_team = _torch_team()
        self._noted: list[Callable[[], Any]] | None = None

    def function(self, name: str, arguments: list[Any], result: Any) -> Callable[..., Any]:
        """A function by its name, with ctypes' types. Raises `CannotBuild` if it is not there.

        One without a result, or with an int that is 0 if all went well, is there for what it writes.
        """
        try:
            function = self._library[name]
        except AttributeError as error:
            raise CannotBuild(f"{self._path} has no {name}: {error}") from error
        function.argtypes, function.restype = arguments, result
        writes = result in (None, ctypes.c_int)

        def call(*given: Any) -> Any:
            if self._noted is None or not writes:
                return function(*given)
            self._noted.append(partial(function, *given))
            return 0

        return call

    @contextmanager
    def noting(self, calls: list[Callable[[], Any]]) -> Iterator[None]:
        """A context in which each call of a function that writes is appended to `calls` and not made.

        What it would have written is not there. Whoever makes the call sees to it that the memory is there
        which it names.
        """
        self._noted = calls
        try:
            yield
        finally:
            self._noted = None


def find_library(
    cache_directory: Path | None, progress: Callable[[str], None]
) -> NativeLibrary | CannotBuild:
    """The library for this machine, compiled if need be, or the reason why there is none."""
    if cache_directory is None:
        return CannotBuild("there is no cache directory to compile it into")
    try:
        return load_library(cache_directory, progress)
    except CannotBuild as error:
        return error


def machine_autotune_cache(
    cache_directory: Path | str | None, library: NativeLibrary | None
) -> AutotuneCache | None:
    """What was measured with this library and this torch on this machine, or a machine just like it."""
    if cache_directory is None:
        return None
    return AutotuneCache(
        native_directory(Path(cache_directory)) / "choices",
        {
            "cpu": cpu_facts(),
            "library": None if library is None else library.name,
            "torch": torch.__version__,
        },
    )


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
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
