"""Drafts tokens from the sequence itself: after a repeated n-gram, the tokens that followed it before.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) predicts texts that quote
their prompt, such as summaries and edits of code. It costs a few lookups in a dictionary for each token.
"""

from engine.sequence import Sequence

NGRAMS = (3, 2)
"""Lengths of the repeated n-grams after which tokens are drafted, tried in order."""
FIRST_LENGTH = 7
MIN_LENGTH = 3
MAX_LENGTH = 127
MAX_INDEXED = 8192
"""Of a longer prompt the last tokens are indexed, which takes about 3 MB."""
MAX_SKIPS = 63
"""Most proposals that are left out after drafts of which no token was right."""


class PromptLookup:
    """The n-grams of one sequence, and how many tokens to draft for it."""

    __slots__ = ("_ends", "_length", "_num_indexed", "_num_misses", "_num_skips", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        #: By n-gram: the position after its latest occurrence that a token follows.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = max(0, sequence.num_tokens - MAX_INDEXED)
        self._length = FIRST_LENGTH
        self._num_misses = self._num_skips = 0

    def draft(self, maximum: int) -> tuple[int, ...]:
        """At most `maximum` tokens that followed the newest n-gram when it occurred before."""
        token_ids = self.sequence.token_ids
        self._index(token_ids)
        start = self._find(token_ids)
        if start is None or maximum < 1:
            return ()
        if self._num_skips:
            self._num_skips -= 1
            return ()
        # A text that repeats itself with a short period is continued beyond its end.
        period = len(token_ids) - start
        return tuple(token_ids[start + offset % period] for offset in range(min(self._length, maximum)))

    def adapt(self, num_drafted: int, num_accepted: int) -> None:
        """Draft more tokens after a draft that was right, fewer or none after wrong ones."""
        if num_accepted == num_drafted:
            self._length = min(2 * self._length + 1, MAX_LENGTH)
        elif 2 * num_accepted < num_drafted:
            self._length = max(MIN_LENGTH, self._length // 2)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        self._num_skips = min(MAX_SKIPS, 2 ** max(0, self._num_misses - 1) - 1)

    def _index(self, token_ids: list[int]) -> None:
        """Index the n-grams before each token that is new."""
        for end in range(self._num_indexed, len(token_ids)):
            for length in NGRAMS:
                if end >= length:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._num_indexed = len(token_ids)

    def _find(self, token_ids: list[int]) -> int | None:
        ends = (self._ends.get(tuple(token_ids[-length:])) for length in NGRAMS)
        return next((end for end in ends if end is not None), None)
