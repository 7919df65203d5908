"""Native draws: the ctypes interface to `native/sampling.cpp`, and its self-check.

Every token is the one that torch draws. The operator returns the few candidates of a row, whose winner is
decided here with the same noise as in torch. A row that it cannot decide is drawn by torch.
"""

import ctypes
import logging

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary
from engine.execution.sampling.draw import Draws, draw, limited_top_k, min_p_thresholds
from engine.execution.sampling.gumbel import draw_keys, gumbel_noise, seed_states
from engine.execution.sampling.slot_params import PARAMS_DTYPE, Integers, Params
from engine.execution.sampling.top_k import row_max

MAX_CANDIDATES = 16
"""Candidates of a row; as in `native/gumbel_candidates.h`."""
UNDECIDED = -1
DRAW_DTYPE = np.dtype(
    [
        ("logits", np.uint64),
        ("argmax", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("max_logit", np.float32),
        ("temperature", np.float32),
        ("threshold", np.float32),
        ("key_low", np.uint32),
        ("key_high", np.uint32),
    ],
    align=True,
)
"""The draw of one row, as `DrawRequest` in `native/sampling.cpp`. `logits` is an address."""
DrawRequests = npt.NDArray[np.void]
"""An array of `DRAW_DTYPE`, one element per row."""
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64

log = logging.getLogger(__name__)


class DrawOperator:
    """The functions of `native/sampling.cpp`. Raises `CannotBuild` if the library lacks them."""

    def __init__(self, library: NativeLibrary) -> None:
        self._row_max = library.function(
            "tokenmill_row_max", [_pointer, _int64, _int64, _pointer, _pointer, _int64, _pointer], None
        )
        self._draw = library.function(
            "tokenmill_draw", [_pointer, _int64, _int64, _pointer, _pointer, _pointer, _int64, _pointer], None
        )
        self._run_team = library.run_team

    def row_max(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `engine.execution.sampling.top_k.row_max`, for float32 on a CPU."""
        rows = rows.contiguous()
        values, indices = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
        self._row_max(
            rows.data_ptr(), *rows.shape, values.data_ptr(), indices.data_ptr(),
            torch.get_num_threads(), self._run_team,
        )  # fmt: skip
        return values, indices

    def draw(self, requests: DrawRequests, vocab_size: int) -> Integers:
        """Tokens [rows]; `UNDECIDED` for rows that torch must draw.

        The addresses in `requests` are of `vocab_size` contiguous float32. A row whose largest logit is not
        finite gets any token.
        """
        token_ids = np.empty((len(requests), MAX_CANDIDATES), dtype=np.int64)
        values = np.empty((len(requests), MAX_CANDIDATES), dtype=np.float32)
        counts = np.empty(len(requests), dtype=np.int64)
        self._draw(
            requests.ctypes.data, len(requests), vocab_size,
            token_ids.ctypes.data, values.ctypes.data, counts.ctypes.data,
            torch.get_num_threads(), self._run_team,
        )  # fmt: skip
        tokens = np.where(counts < 0, UNDECIDED, token_ids[:, 0])
        rows = np.flatnonzero(counts > 1)
        if len(rows):
            tokens[rows] = _winners(token_ids[rows], values[rows], counts[rows], requests[rows])
        return tokens


def draw_requests(
    addresses: npt.NDArray[np.uint64],
    max_logits: npt.NDArray[np.float32],
    argmax: Integers,
    params: Params,
    indices: Integers,
    vocab_size: int,
) -> DrawRequests:
    """The draws of rows at `addresses` whose largest logits, `max_logits`, are at `argmax`; all [rows].

    `indices`: the number of tokens of each output.
    """
    requests = np.empty(len(params), dtype=DRAW_DTYPE)
    keys = draw_keys(params["seed_state"], indices)
    requests["logits"], requests["max_logit"], requests["argmax"] = addresses, max_logits, argmax
    requests["temperature"], requests["top_p"] = params["temperature"], params["top_p"]
    requests["top_k"], requests["threshold"] = limited_top_k(params, vocab_size), min_p_thresholds(params)
    requests["key_low"], requests["key_high"] = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
    return requests


def row_addresses(rows: torch.Tensor) -> npt.NDArray[np.uint64]:
    """The addresses of `rows` [rows, width], each contiguous float32 on a CPU."""
    step = rows.stride(0) * rows.element_size()
    return np.arange(len(rows), dtype=np.uint64) * np.uint64(step) + np.uint64(rows.data_ptr())


def _winners(
    token_ids: Integers, values: npt.NDArray[np.float32], counts: Integers, requests: DrawRequests
) -> Integers:
    """The candidate of each row with the largest sum; the first token of equal ones."""
    width = int(counts.max())
    is_candidate = np.arange(width) < counts[:, None]
    token_ids = np.where(is_candidate, token_ids[:, :width], 0)
    keys = np.stack([requests["key_low"], requests["key_high"]], 1).view(np.int32)
    noise = gumbel_noise(torch.from_numpy(keys), torch.from_numpy(token_ids).int()).numpy()
    # Values beyond the candidates are uninitialized.
    noisy = np.where(is_candidate, values[:, :width], np.float32(-np.inf)) + noise
    wins = noisy == noisy.max(1, keepdims=True)
    first: Integers = np.where(wins, token_ids, np.iinfo(np.int64).max).min(1)
    return first


def choose_draw_operator(library: NativeLibrary | CannotBuild) -> DrawOperator | None:
    """The native operator, if it is available and passes its self-check."""
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
    """Raise `CannotBuild` if the compiled operator does not draw what torch draws on this machine."""
    params = np.zeros(48, dtype=PARAMS_DTYPE)
    params["temperature"] = np.resize([1.0, 0.7, 2.0], 48)
    params["top_k"] = np.resize([0, 0, 50, 400], 48)
    params["top_p"] = np.resize([0.9, 1.0, 0.9, 1.0, 0.6, 1.0, 1.0, 1.0], 48)
    params["min_p"] = np.resize([0.0, 0.0, 0.0, 0.0, 0.0, 0.01], 48)
    params["seed_state"] = seed_states(list(range(48)))
    logits = torch.randn(48, 5000, generator=torch.Generator().manual_seed(0)) * 3
    expected = row_max(logits)
    if not all(map(torch.equal, operator.row_max(logits), expected)):
        raise CannotBuild("the compiled row maximum disagrees with torch on this machine")
    indices, vocab_size = np.arange(48), logits.shape[1]
    max_logits, argmax = (one.numpy() for one in expected)
    requests = draw_requests(row_addresses(logits), max_logits, argmax, params, indices, vocab_size)
    drawn = operator.draw(requests, vocab_size)
    draws = Draws.of(params, indices, vocab_size, logits.device)
    tokens = draw((logits - expected[0][:, None]) / draws.temperature[:, None], draws).numpy()
    # About one row in a thousand depends on a rounding and may be undecided.
    if (drawn == UNDECIDED).sum() > 1 or ((drawn != tokens) & (drawn != UNDECIDED)).any():
        raise CannotBuild("the compiled draw disagrees with torch on this machine")
