"""Finds stop strings in a stream of text, and holds back text that may be the start of one.

A character costs amortised constant time, independent of the number and length of the stop strings.
"""

from collections import deque

from engine.text.pattern_automaton import ROOT, automaton_of


class StopStrings:
    """Passes text on up to the first stop string; `is_included`: with the stop string itself.

    `matched`: a stop string was found: the one that is complete first, and of those the longest.
    """

    def __init__(self, stop: tuple[str, ...], *, is_included: bool = False) -> None:
        self._automaton = automaton_of(stop) if stop else None
        self._is_included = is_included
        self._state = ROOT
        #: Text held back, in pieces.
        self._held = deque[str]()
        self._num_held = 0
        self.matched = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can be passed on: up to a stop string, or up to a possible start of one.

        Without `may_stop`, stop strings completed in `text` are ignored.
        """
        automaton = self._automaton
        if automaton is None:
            return text
        if self.matched:
            return ""
        state, advance, matches = self._state, automaton.advance, automaton.longest_match
        for position, character in enumerate(text, 1):
            state = advance(state, character)
            if may_stop and (length := matches[state]):
                return self._stop(text[:position], length)
        self._state = state
        self._hold(text)
        return self._release(self._num_held - automaton.num_open[state])

    def close(self) -> str:
        """The text held back, which did not become a stop string."""
        self._state = ROOT
        return self._release(self._num_held)

    def _stop(self, text: str, length: int) -> str:
        """Pass on the text before the stop string of `length` at the end of `text`, or including it."""
        self.matched = True
        self._hold(text)
        released = self._release(self._num_held - (0 if self._is_included else length))
        self._held.clear()
        self._num_held = 0
        return released

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._num_held += len(text)

    def _release(self, num_characters: int) -> str:
        """The first `num_characters` held back."""
        self._num_held -= num_characters
        pieces: list[str] = []
        while num_characters:
            piece = self._held.popleft()
            if len(piece) > num_characters:
                self._held.appendleft(piece[num_characters:])
                piece = piece[:num_characters]
            pieces.append(piece)
            num_characters -= len(piece)
        return "".join(pieces)
