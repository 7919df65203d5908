"""The native searches of vocabularies as functions of Python, and their trial.

Law: what a compiler made wrongly is not used, so that no draw depends on whether there was a compiler. The
operators check nothing, so their callers do.
"""

import ctypes
import logging

import torch

from engine.execution.gumbel import UNIFORM_BITS, hash_tokens, uniform_bits
from engine.execution.largest import TILE
from engine.execution.native_build import CannotBuild
from engine.execution.native_library import NativeLibrary
from engine.execution.searches import TORCH, Searches

ROOM_PER_TILE = 16
"""Contenders that there is room for at first; there are one or two."""
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64

log = logging.getLogger(__name__)


class SearchOperators:
    """The functions of `native/sampling.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        self._largest = library.function(
            "tokenmill_largest", [_pointer, *[_int64] * 3, _pointer, _pointer, _int64, _pointer], ctypes.c_int
        )
        self._pass_by_hash = library.function(
            "tokenmill_pass_by_hash", [_pointer, _pointer, _int64, _int64, _pointer, _int64], _int64
        )
        self._run_team = library.run_team

    def largest(self, rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Searches`. What is not in float32 on a CPU, torch searches."""
        if rows.dtype is not torch.float32 or rows.device.type != "cpu":
            return TORCH.largest(rows, number)
        rows = rows.contiguous()
        values = torch.empty(len(rows), number)
        places = torch.empty(len(rows), number, dtype=torch.int64)
        failed = self._largest(
            rows.data_ptr(), len(rows), rows.shape[1], number,
            values.data_ptr(), places.data_ptr(), torch.get_num_threads(), self._run_team,
        )  # fmt: skip
        if failed:
            raise MemoryError("the native search got no memory")
        return values, places

    def pass_by_hash(self, keys: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """See `Searches`."""
        keys, least = keys.contiguous(), least.contiguous()
        room = ROOM_PER_TILE * least.numel()
        while True:
            places = torch.empty(room, dtype=torch.int64)
            number = self._pass_by_hash(
                keys.data_ptr(), least.data_ptr(), len(least), least.shape[1], places.data_ptr(), room
            )
            if number <= room:
                return places[:number]
            room = number

    def searches(self) -> Searches:
        return Searches(self.largest, self.pass_by_hash)


def choose_searches(library: NativeLibrary | CannotBuild) -> Searches:
    """The native ones if they can be had and find what torch's find, otherwise torch's."""
    if isinstance(library, CannotBuild):
        return TORCH
    try:
        native = SearchOperators(library).searches()
        check_searches(native)
    except CannotBuild as error:
        log.warning(
            "the vocabulary is searched by torch, which is slower than the native operator: %s", error
        )
        return TORCH
    return native


def check_searches(native: Searches) -> None:
    """A trial on this machine: what a compiler made wrongly is not used. Raises `CannotBuild`."""
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(3, 5000, generator=generator) * 20).round()
    keys = torch.randint(-(2**31), 2**31, (3, 2), generator=generator).int()
    # Bounds that one token of each tile meets exactly, but for the tile that none can.
    least = uniform_bits(hash_tokens(keys, torch.arange(100, 7 * TILE, TILE, dtype=torch.int32)))
    least[1, 3] = 1 << UNIFORM_BITS
    values, places = native.largest(rows, 100)
    if not (
        torch.equal(values, TORCH.largest(rows, 100)[0])
        and torch.equal(rows.gather(1, places), values)
        and torch.equal(native.pass_by_hash(keys, least), TORCH.pass_by_hash(keys, least))
    ):
        raise CannotBuild("what was compiled disagrees with torch on this machine")
