"""Who decodes when a step has fewer tokens than there are decodes: they take turns.

Law: nobody decodes twice before another has decoded once, so that no running sequence starves; and decodes
leave to prefills the share of a step that is kept for them, as far as these can use it. Takes no blocks.
"""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.outputs import WaitingReason
from engine.sequence import Sequence


class DecodeRotation:
    """Chooses the decodes of a step, and remembers those whose turn it is in the next."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_tokens = config.max_num_batched_tokens
        self._num_reserved = config.num_reserved_tokens
        # Who goes first when not all can, while that lasts.
        self._line: list[Sequence] = []

    def choose(
        self, decoding: list[Sequence], num_prefill_tokens: Callable[[], int]
    ) -> tuple[list[Sequence], list[Sequence], WaitingReason]:
        """Those of `decoding` who decode now, in the same order, those passed over, and for which reason.

        `num_prefill_tokens`: how many tokens prefills could use; asked only when it matters.
        """
        if len(decoding) <= self._num_tokens - self._num_reserved:
            self._line = []
            return decoding, [], WaitingReason.TOKEN_BUDGET
        num_kept = min(self._num_reserved, num_prefill_tokens()) if self._num_reserved else 0
        chosen = self._rotate(decoding, self._num_tokens - num_kept)
        reason = WaitingReason.PREFILL_RESERVE if num_kept else WaitingReason.TOKEN_BUDGET
        return (
            [sequence for sequence in decoding if sequence in chosen],
            [sequence for sequence in decoding if sequence not in chosen],
            reason,
        )

    def _rotate(self, decoding: list[Sequence], num_places: int) -> set[Sequence]:
        present, known = set(decoding), set(self._line)
        line = [sequence for sequence in self._line if sequence in present]
        line += [sequence for sequence in decoding if sequence not in known]
        chosen, passed_over = line[:num_places], line[num_places:]
        self._line = passed_over + chosen
        return set(chosen)
