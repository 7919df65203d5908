"""The native draws as functions of Python, and their trial.

Law: every token is the one that torch draws. The operator names the few tokens that may win; which of them
does is told by the same noise as everywhere. Where it cannot tell, it says so, and torch is asked.
"""

import ctypes
import logging

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary
from engine.execution.sampling.draw import Draws, draw, least_logits, limited_top_k
from engine.execution.sampling.gumbel import draw_keys, gumbel_noise, seed_states
from engine.execution.sampling.slot_params import ROW, Numbers, Rows
from engine.execution.sampling.top_k import first_largest

ROOM = 16
"""Tokens that are named for a row; as in `native/contenders.h`."""
UNDECIDED = -1
ASKED = np.dtype(
    [
        ("logits", np.uint64),
        ("likeliest", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("largest", np.float32),
        ("temperature", np.float32),
        ("lowest", np.float32),
        ("low", np.uint32),
        ("high", np.uint32),
    ],
    align=True,
)
"""What is asked of a row's draw, as `native/sampling.cpp` has it. `logits` is an address."""
Asked = npt.NDArray[np.void]
"""Of `ASKED`, one for each row."""
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64

log = logging.getLogger(__name__)


class DrawOperator:
    """The functions of `native/sampling.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        self._first_largest = library.function(
            "tokenmill_first_largest", [_pointer, _int64, _int64, _pointer, _pointer, _int64, _pointer], None
        )
        self._draw = library.function(
            "tokenmill_draw", [_pointer, _int64, _int64, _pointer, _pointer, _pointer, _int64, _pointer], None
        )
        self._run_team = library.run_team

    def first_largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `engine.execution.sampling.top_k.first_largest`, of float32 on a CPU."""
        rows = rows.contiguous()
        values, places = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
        self._first_largest(
            rows.data_ptr(), *rows.shape, values.data_ptr(), places.data_ptr(),
            torch.get_num_threads(), self._run_team,
        )  # fmt: skip
        return values, places

    def draw(self, asked: Asked, vocab_size: int) -> Numbers:
        """Tokens [rows]; `UNDECIDED` where torch must be asked.

        The addresses in `asked` are of `vocab_size` float32 that lie side by side. A row whose largest is not
        finite gets any token.
        """
        places = np.empty((len(asked), ROOM), dtype=np.int64)
        values = np.empty((len(asked), ROOM), dtype=np.float32)
        counts = np.empty(len(asked), dtype=np.int64)
        self._draw(
            asked.ctypes.data, len(asked), vocab_size,
            places.ctypes.data, values.ctypes.data, counts.ctypes.data,
            torch.get_num_threads(), self._run_team,
        )  # fmt: skip
        tokens = np.where(counts < 0, UNDECIDED, places[:, 0])
        several = np.flatnonzero(counts > 1)
        if len(several):
            tokens[several] = _winners(places[several], values[several], counts[several], asked[several])
        return tokens


def ask(
    addresses: npt.NDArray[np.uint64],
    largest: npt.NDArray[np.float32],
    likeliest: Numbers,
    params: Rows,
    indices: Numbers,
    vocab_size: int,
) -> Asked:
    """What is asked of rows at `addresses` whose `largest` logits are at `likeliest`, all [rows].

    `indices`: how many tokens each output has.
    """
    asked = np.empty(len(params), dtype=ASKED)
    keys = draw_keys(params["seed_state"], indices)
    asked["logits"], asked["largest"], asked["likeliest"] = addresses, largest, likeliest
    asked["temperature"], asked["top_p"] = params["temperature"], params["top_p"]
    asked["top_k"], asked["lowest"] = limited_top_k(params, vocab_size), least_logits(params)
    asked["low"], asked["high"] = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
    return asked


def row_addresses(rows: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Of `rows` [rows, width], float32 on a CPU, each of which lies side by side."""
    step = rows.stride(0) * rows.element_size()
    return np.arange(len(rows), dtype=np.uint64) * np.uint64(step) + np.uint64(rows.data_ptr())


def _winners(places: Numbers, values: npt.NDArray[np.float32], counts: Numbers, asked: Asked) -> Numbers:
    """Whose sum is the largest of each row's; of equal ones the first token, as everywhere."""
    width = int(counts.max())
    is_one = np.arange(width) < counts[:, None]
    token_ids = np.where(is_one, places[:, :width], 0)
    keys = np.stack([asked["low"], asked["high"]], 1).view(np.int32)
    noise = gumbel_noise(torch.from_numpy(keys), torch.from_numpy(token_ids).int()).numpy()
    # What stands where there is no token was never written, and may be a NaN that numpy warns of.
    noisy = np.where(is_one, values[:, :width], np.float32(-np.inf)) + noise
    wins = noisy == noisy.max(1, keepdims=True)
    first: Numbers = np.where(wins, token_ids, np.iinfo(np.int64).max).min(1)
    return first


def choose_draw_operator(library: NativeLibrary | CannotBuild) -> DrawOperator | None:
    """The native one if it can be had and draws what torch does."""
    if isinstance(library, CannotBuild):
        return None
    try:
        operator = DrawOperator(library)
        check_draw_operator(operator)
    except CannotBuild as error:
        log.warning("tokens are drawn by torch, which is slower than the native operator: %s", error)
        return None
    return operator


def check_draw_operator(operator: DrawOperator) -> None:
    """A trial on this machine: what a compiler made wrongly is not used. Raises `CannotBuild`."""
    params = np.zeros(48, dtype=ROW)
    params["temperature"] = np.resize([1.0, 0.7, 2.0], 48)
    params["top_k"] = np.resize([0, 0, 50, 400], 48)
    params["top_p"] = np.resize([0.9, 1.0, 0.9, 1.0, 0.6, 1.0, 1.0, 1.0], 48)
    params["min_p"] = np.resize([0.0, 0.0, 0.0, 0.0, 0.0, 0.01], 48)
    params["seed_state"] = seed_states(list(range(48)))
    logits = torch.randn(48, 5000, generator=torch.Generator().manual_seed(0)) * 3
    right = first_largest(logits)
    if not all(map(torch.equal, operator.first_largest(logits), right)):
        raise CannotBuild("what was compiled disagrees with torch on this machine")
    indices, vocab_size = np.arange(48), logits.shape[1]
    largest, likeliest = (one.numpy() for one in right)
    asked = ask(row_addresses(logits), largest, likeliest, params, indices, vocab_size)
    drawn = operator.draw(asked, vocab_size)
    draws = Draws.of(params, indices, vocab_size, logits.device)
    tokens = draw((logits - right[0][:, None]) / draws.temperature[:, None], draws).numpy()
    # Where a draw hangs on a rounding, of which there are none in a thousand, it may say so.
    if (drawn == UNDECIDED).sum() > 1 or ((drawn != tokens) & (drawn != UNDECIDED)).any():
        raise CannotBuild("what was compiled disagrees with torch on this machine")
