"""Masks that set the logits of forbidden tokens to -inf: allowed ids, bad words, minimum length, grammars.

A mask depends on its own sequence only, and a failing grammar fails its own row. If a grammar allows only
end-of-text tokens, they stay allowed before `min_tokens`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.penalties import in_vocabulary
from engine.sequence import Sequence
from engine.structured_outputs import FIELD
from engine.text.bad_sequences import BadSequences
from engine.text.pattern_automaton import ROOT

Bits = npt.NDArray[np.int32]
# For each byte of a bitmask, what is added to the logits of its eight tokens.
_ADDED = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(0), np.float32(-np.inf))


class _ConstantMasks:
    """What is constant for a sequence, and equal for all outputs of a request."""

    __slots__ = ("allowed", "bad", "ends", "no_ends")

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        constraints, allowed = sequence.constraints, sequence.params.allowed_token_ids
        self.ends = in_vocabulary(list(constraints.end_token_ids), vocab_size)
        self.bad = BadSequences(constraints.bad_token_ids, vocab_size)
        ids = None if allowed is None else in_vocabulary(list(allowed), vocab_size)
        self.allowed = _bits(ids, self.bad.always_banned, vocab_size)
        self.no_ends = _bits(None, self.ends, vocab_size)


class RowMasks:
    """The masks of one sequence: constant parts are made once, the rest from its new tokens.

    `shared`: masks of another output of the same request, with the same constant parts.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, shared: "RowMasks | None" = None) -> None:
        self._sequence = sequence
        constraints, allowed = sequence.constraints, sequence.params.allowed_token_ids
        self.grammar = constraints.grammar
        #: Whether the mask lists allowed tokens rather than forbidden ones.
        self.is_dense = self.grammar is not None or allowed is not None
        self._state = ROOT
        self._num_seen = sequence.num_prompt_tokens
        self._constant: _ConstantMasks = (
            _ConstantMasks(sequence, vocab_size) if shared is None else shared._constant
        )

    def shares(self, sequence: Sequence) -> bool:
        """Whether `sequence` has the same constant parts, by identity."""
        mine, other = self._sequence, sequence
        return (
            mine.params.allowed_token_ids is other.params.allowed_token_ids
            and mine.constraints.bad_token_ids is other.constraints.bad_token_ids
            and mine.constraints.end_token_ids is other.constraints.end_token_ids
        )

    def banned(self) -> list[int]:
        """The ids that must not come next, if the mask is not dense."""
        return (
            self._constant.bad.always_banned
            + self._completing()
            + (self._constant.ends if self._is_too_short else [])
        )

    def allow(self, row: Bits) -> None:
        """Write the bitmask of allowed tokens into `row`, int32 [ceil(vocabulary / 32)].

        Raises what the grammar raises.
        """
        row.fill(-1)
        if self.grammar is not None:
            row.fill(0)
            self.grammar.advance(self._sequence.output_token_ids)
            self.grammar.fill_bitmask(row)
        # Also clears bits beyond the vocabulary.
        row &= self._constant.allowed
        _clear(row, self._completing())
        if self._is_too_short:
            self._clear_ends(row)

    def _clear_ends(self, row: Bits) -> None:
        without = row & self._constant.no_ends
        if self.grammar is None or without.any():
            row[:] = without

    @property
    def _is_too_short(self) -> bool:
        return self._sequence.num_output_tokens < self._sequence.params.min_tokens

    def _completing(self) -> list[int]:
        """The ids that would complete a forbidden sequence."""
        token_ids, automaton, state = self._sequence.token_ids, self._constant.bad.automaton, self._state
        for token_id in token_ids[self._num_seen :]:
            state = automaton.advance(state, token_id)
        self._state, self._num_seen = state, len(token_ids)
        return self._constant.bad.completing(state, token_ids)


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """The masks of some rows of logits [rows, vocabulary], on the host.

    `banned`: indices of forbidden tokens in the flattened logits. `bits` [len(rows), words]: bitmasks of
    allowed tokens for `rows`, which are not in `banned`. `faults`: errors of grammars, by row.
    """

    banned: list[int]
    rows: list[int]
    bits: Bits
    faults: dict[int, str]

    @classmethod
    def of(cls, masks: list[tuple[int, RowMasks]], vocab_size: int) -> "FilledMasks":
        """Advance the grammars and fill their masks, on the host only."""
        dense = [(row, one) for row, one in masks if one.is_dense]
        sparse = [(row, one.banned()) for row, one in masks if not one.is_dense]
        bits = np.zeros((len(dense), -(-vocab_size // 32)), dtype=np.int32)
        faults: dict[int, str] = {}
        for (row, one), allowed in zip(dense, bits, strict=True):
            try:
                one.allow(allowed)
            except ValueError as error:  # the text left the grammar, or it is too costly to follow
                faults[row] = f"{FIELD}: {error}"[:500]
            except Exception as error:  # noqa: BLE001 - a grammar library may raise anything
                faults[row] = f"its grammar failed: {type(error).__name__}: {error}"[:500]
        flat = [row * vocab_size + token_id for row, banned in sparse for token_id in banned]
        return cls(flat, [row for row, _ in dense], bits, faults)

    def apply(self, logits: torch.Tensor) -> None:
        """Set forbidden tokens to -inf in `logits`, in place. The host does not wait for the device."""
        device = logits.device
        if self.banned:
            logits.view(-1).index_fill_(0, copy_to_device(torch.tensor(self.banned), device), -torch.inf)
        if self.rows:
            added = unpacked(self.bits, device)[:, : logits.shape[1]]
            logits.index_add_(0, copy_to_device(torch.tensor(self.rows), device), added)


def unpacked(bits: Bits, device: torch.device) -> torch.Tensor:
    """Addends for logits [rows, 32 * words]: 0 where a bit is set, -inf elsewhere."""
    if device.type == "cpu":
        return torch.from_numpy(np.take(_ADDED, bits.view(np.uint8), axis=0)).flatten(1)
    return unpacked_on(bits, device)


def unpacked_on(bits: Bits, device: torch.device) -> torch.Tensor:
    """The same, unpacked on the device; on a CPU ten times slower."""
    packed = copy_to_device(torch.from_numpy(bits.view(np.uint8)), device)
    allowed = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    added = torch.zeros(allowed.shape, device=device)
    return added.masked_fill_(allowed == 0, -torch.inf).flatten(1)


def _bits(allowed: list[int] | None, banned: list[int], vocab_size: int) -> Bits:
    """A bitmask of the ids `allowed` (None: all) without `banned`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[slice(vocab_size) if allowed is None else allowed] = 1
    flags[banned] = 0
    return np.packbits(flags, bitorder="little").view(np.int32)


def _clear(row: Bits, token_ids: list[int]) -> None:
    words = row.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] &= 0xFFFFFFFF ^ (1 << (token_id & 31))
