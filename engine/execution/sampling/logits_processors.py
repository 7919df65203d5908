"""Applies what requests ask of their logits before the draw, to the rows that ask for anything.

Law: rows that ask for nothing are neither copied nor looked at twice, and the given logits stay as they are.
The order is penalties, bias, masks. What is kept of a sequence is kept by its slot while it sits there, and
can be made again from the sequence at any time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.logit_masks import FilledMasks, RowMasks
from engine.execution.sampling.penalties import Bias, TokenCounts, add_bias, penalize
from engine.execution.sampling.slot_params import Numbers, is_penalized
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Edited:
    """Changed copies `logits` [edited rows, vocabulary] of `rows`; `faults`: errors, by row of the batch.

    `row_numbers`: the same as `rows`, ascending, on the host.
    """

    rows: torch.Tensor
    row_numbers: Numbers
    logits: torch.Tensor
    faults: dict[int, str]


class LogitEdits:
    """Edits the logits of a batch; remembers counts and masks of the sequences that sit in its slots."""

    def __init__(self) -> None:
        self._kept: dict[int | None, _Kept] = {}

    def apply(
        self, logits: torch.Tensor, sequences: list[Sequence], candidates: Iterable[int]
    ) -> Edited | None:
        """Edit what must be of `logits` [rows, vocabulary], float32; None if no row asks for anything.

        `candidates`: the rows that may ask for something, in order. Grammars fill their masks before the
        logits are used, so on a GPU while the forward pass still runs.
        """
        edited = [row for row in candidates if is_edited(sequences[row])]
        if not edited:
            return None
        kept = [self._keep(sequences[row], logits.shape[1]) for row in edited]
        masks = FilledMasks.of([(at, one.masks) for at, one in enumerate(kept) if one.masks], logits.shape[1])
        row_numbers = np.array(edited, dtype=np.int64)
        rows = copy_to_device(torch.from_numpy(row_numbers), logits.device)
        changed = logits[rows] if len(edited) < len(sequences) else logits.clone()
        penalize(changed, [(at, one.repetition, one.counts) for at, one in enumerate(kept) if one.counts])
        add_bias(changed, [(at, one.bias) for at, one in enumerate(kept) if one.bias])
        masks.apply(changed)
        faults = {edited[at]: fault for at, fault in masks.faults.items()}
        return Edited(rows, row_numbers, changed, faults)

    def _keep(self, sequence: Sequence, vocab_size: int) -> "_Kept":
        kept = self._kept.get(sequence.slot)
        # Compared by identity: another sequence may have taken the slot.
        if kept is None or kept.sequence is not sequence:
            kept = self._kept[sequence.slot] = _Kept(sequence, vocab_size, self._sibling_masks(sequence))
        elif kept.counts:
            kept.counts.catch_up()
        return kept

    def _sibling_masks(self, sequence: Sequence) -> RowMasks | None:
        """Those of another output of the same request, if it has any: large masks are made once."""
        found = (one.masks for one in self._kept.values() if one.masks and one.masks.shares(sequence))
        return next(found, None)

    def forget_those_who_left(self) -> None:
        """Those whose slot another one has, or nobody: preempted and ended sequences have none."""
        left = [slot for slot, kept in self._kept.items() if kept.sequence.slot != slot]
        for slot in left:
            del self._kept[slot]


class _Kept:
    """Made once for each sequence that is edited."""

    __slots__ = ("bias", "counts", "masks", "repetition", "sequence")

    def __init__(self, sequence: Sequence, vocab_size: int, sibling: RowMasks | None) -> None:
        self.sequence = sequence
        self.repetition = sequence.params.repetition_penalty
        self.counts = TokenCounts(sequence, vocab_size) if is_penalized(sequence.params) else None
        self.bias = Bias(sequence, vocab_size) if sequence.params.logit_bias else None
        self.masks = RowMasks(sequence, vocab_size, sibling) if _is_masked(sequence) else None


def is_edited(sequence: Sequence) -> bool:
    """Whether it asks anything of its next logits."""
    params = sequence.params
    return is_penalized(params) or bool(params.logit_bias) or _is_masked(sequence)


def _is_masked(sequence: Sequence) -> bool:
    params, constraints = sequence.params, sequence.constraints
    return bool(
        constraints.grammar is not None
        or constraints.bad_token_ids
        or params.allowed_token_ids is not None
        or params.min_tokens > sequence.num_output_tokens
    )
