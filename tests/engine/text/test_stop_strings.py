"""Stop strings against a naive reference, and their cost in steps of the automaton."""

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.pattern_automaton import PatternAutomaton, automaton_of
from engine.text.stop_strings import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)
PUSHES = st.lists(st.tuples(st.text("abc", max_size=5), st.booleans()), max_size=12)


class NaiveStopStrings:
    """Reference: searches the whole text for every stop string."""

    def __init__(self, stop: tuple[str, ...], is_included: bool) -> None:
        self.stop, self.is_included = stop, is_included
        self.text, self.num_sent, self.matched = "", 0, False

    def push(self, text: str, may_stop: bool) -> str:
        if self.matched:
            return ""
        num_old, self.text = len(self.text), self.text + text
        for end in range(num_old + 1, len(self.text) + 1):
            found = [len(one) for one in self.stop if may_stop and self.text[:end].endswith(one)]
            if found:
                self.matched = True
                return self._send(end if self.is_included else end - max(found))
        prefixes = {one[:length] for one in self.stop for length in range(1, len(one))}
        return self._send(
            len(self.text) - max((len(p) for p in prefixes if self.text.endswith(p)), default=0)
        )

    def _send(self, end: int) -> str:
        sent, self.num_sent = self.text[self.num_sent : end], end
        return sent


@given(STOPS, PUSHES, st.booleans())
@example(stop=("ab", "babb"), pushes=[("ba", True), ("b", False), ("b", True)], is_included=False)
@example(stop=("aab", "ab", "b"), pushes=[("aa", False), ("b", True)], is_included=True)
def test_every_push_matches_a_direct_search(
    stop: tuple[str, ...], pushes: list[tuple[str, bool]], is_included: bool
) -> None:
    strings, naive = StopStrings(stop, is_included=is_included), NaiveStopStrings(stop, is_included)

    for text, may_stop in pushes:
        assert strings.push(text, may_stop=may_stop) == naive.push(text, may_stop)
        assert strings.matched is naive.matched
    rest = "" if naive.matched else naive.text[naive.num_sent :]
    assert strings.close() == rest


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6))
def test_matches_are_all_patterns_that_end_in_a_state(patterns: list[list[int]]) -> None:
    automaton, state, seen = PatternAutomaton(patterns), 0, list[int]()

    for symbol in [0, 1, 0, 0, 2, 1, 0, 1, 1, 2, 2, 0, 1, 0]:
        state = automaton.advance(state, symbol)
        seen.append(symbol)
        ending = {len(one) for one in patterns if seen[-len(one) :] == one}
        assert list(automaton.matches(state)) == sorted(ending, reverse=True)


class CountedFailures:
    """Counts followed failure links."""

    def __init__(self, failures: "array[int]") -> None:
        self.failures, self.count = failures, 0

    def __getitem__(self, state: int) -> int:
        self.count += 1
        return self.failures[state]


@pytest.mark.parametrize(("num_stops", "length"), [(1, 2), (1, 1024), (16, 32), (16, 1024)])
def test_steps_do_not_grow_with_the_stop_strings(num_stops: int, length: int) -> None:
    """Each character goes one state deeper at most, and each failure link at least one state up."""
    stops = tuple("a" * (length - 1) + chr(ord("b") + index) for index in range(num_stops))
    automaton = PatternAutomaton(stops)
    counted = CountedFailures(automaton._failures)
    automaton._failures = counted  # type: ignore[assignment]  # a fake that counts
    text = ("a" * 700 + "zza") * 10
    state = 0

    for character in text:
        state = automaton.advance(state, character)

    assert counted.count <= len(text)


@pytest.mark.parametrize("length", [2, 1024])
def test_held_text_is_not_copied_with_every_push(length: int) -> None:
    """Held text is kept in pieces, so that a push costs as much as its own text."""
    strings = StopStrings(("a" * length + "b",))
    sent = [strings.push("a") for _ in range(3000)]

    assert sent == [""] * length + ["a"] * (3000 - length)
    assert {len(piece) for piece in strings._held} == {1}


def test_equal_stop_strings_share_one_automaton() -> None:
    assert automaton_of(("x" * 100, "y")) is automaton_of(("x" * 100, "y"))
