"""Rotation of decodes when a step has fewer tokens than decodes.

Invariants: no sequence decodes twice before another has decoded once. Decodes leave the prefill reserve to
prefills that can use it.
"""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.outputs import WaitingReason
from engine.sequence import Sequence


class DecodeRotation:
    """Chooses the decodes of a step, and remembers which go first in the next one."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_tokens = config.max_num_batched_tokens
        self._num_reserved = config.num_reserved_tokens
        # Order of the next rotation; empty while all decodes fit.
        self._order: list[Sequence] = []

    def choose(
        self, decoding: list[Sequence], num_prefill_tokens: Callable[[], int]
    ) -> tuple[list[Sequence], list[Sequence], WaitingReason]:
        """The sequences that decode in this step, those that do not, and the reason. Both keep the order of
        `decoding`.

        `num_prefill_tokens` returns the tokens that prefills could use. It is called only if not all decodes
        fit.
        """
        if len(decoding) <= self._num_tokens - self._num_reserved:
            self._order = []
            return decoding, [], WaitingReason.TOKEN_BUDGET
        num_kept = min(self._num_reserved, num_prefill_tokens()) if self._num_reserved else 0
        chosen = self._rotate(decoding, self._num_tokens - num_kept)
        reason = WaitingReason.PREFILL_RESERVE if num_kept else WaitingReason.TOKEN_BUDGET
        return (
            [sequence for sequence in decoding if sequence in chosen],
            [sequence for sequence in decoding if sequence not in chosen],
            reason,
        )

    def _rotate(self, decoding: list[Sequence], num_tokens: int) -> set[Sequence]:
        present, known = set(decoding), set(self._order)
        order = [sequence for sequence in self._order if sequence in present]
        order += [sequence for sequence in decoding if sequence not in known]
        chosen, passed_over = order[:num_tokens], order[num_tokens:]
        self._order = passed_over + chosen
        return set(chosen)
