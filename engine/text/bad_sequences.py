"""Forbidden sequences of token ids: finds the ids that would complete one."""

from engine.text.pattern_automaton import ROOT, PatternAutomaton


class BadSequences:
    """An automaton over the output for `bad_token_ids`, without ids outside the vocabulary.

    `always_banned`: sequences of one id. A new token costs amortised constant time, plus the
    number of sequences that it could complete.
    """

    def __init__(self, bad_token_ids: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
        known = [bad for bad in bad_token_ids if bad and 0 <= bad[-1] < vocab_size]
        self.always_banned = [bad[0] for bad in known if len(bad) == 1]
        self._last_of: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in known:
            if prefix:
                self._last_of.setdefault(tuple(prefix), []).append(last)
        self.automaton = PatternAutomaton(self._last_of)
        # Banned ids by state, filled in when a state is first reached.
        self._by_state: dict[int, list[int]] = {ROOT: []}

    def completing(self, state: int, token_ids: list[int]) -> list[int]:
        """The ids that must not follow `token_ids`, which lead to `state`."""
        banned = self._by_state.get(state)
        if banned is None:
            lengths = self.automaton.matches(state)
            prefixes = [tuple(token_ids[-length:]) for length in lengths]
            banned = self._by_state[state] = [last for prefix in prefixes for last in self._last_of[prefix]]
        return banned
