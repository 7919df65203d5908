"""Finds stop strings in a stream of text, and holds back what may be the start of one.

One character costs an amortised constant number of steps, whatever the number and length of the stop strings.
"""

from collections import deque

from engine.text.pattern_automaton import ROOT, automaton_of


class StopStrings:
    """Passes text on until the first stop string is complete; `is_included`: up to its end, else its start.

    `matched`: one was found. Of several, the first that is complete counts; of those, the longest.
    """

    def __init__(self, stop: tuple[str, ...], *, is_included: bool = False) -> None:
        self._automaton = automaton_of(stop) if stop else None
        self._is_included = is_included
        self._state = ROOT
        #: What is held back, as it came.
        self._held = deque[str]()
        self._num_held = 0
        self.matched = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can be passed on: up to a stop string, or up to what may become one.

        Without `may_stop`, a stop string that `text` completes is text like any other.
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
        """What was held back and is text after all."""
        self._state = ROOT
        return self._release(self._num_held)

    def _stop(self, text: str, length: int) -> str:
        """Pass on what stands before the stop string of `length` that `text` ends with, or all of it."""
        self.matched = True
        self._hold(text)
        free = self._release(self._num_held - (0 if self._is_included else length))
        self._held.clear()
        self._num_held = 0
        return free

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._num_held += len(text)

    def _release(self, num_characters: int) -> str:
        """The first `num_characters` of what is held back. Costs as much as it returns."""
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
