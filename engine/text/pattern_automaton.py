"""The automaton of Aho and Corasick (1975): finds several patterns at once in a stream of symbols.

A symbol costs amortised constant time, independent of the number and length of the patterns. Symbols are
characters or token ids. An automaton is immutable, so that streams share it.
"""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache

ROOT = 0
_NO_STATE = -1


class PatternAutomaton:
    """States are the prefixes of `patterns`; state 0 is the empty one.

    A state is the longest suffix of the input that is a prefix of some pattern. Most states have one child,
    so first children are stored in arrays and further ones in a dict: 16 patterns of 1,024 characters take
    half a megabyte.

    `longest_match[state]`: length of the longest pattern that ends here, or 0. `num_open[state]`: length of
    the longest suffix that is a proper prefix of some pattern, which more symbols could complete.
    """

    def __init__(self, patterns: Iterable[Sequence[Hashable]]) -> None:
        self._symbols: list[Hashable] = [None]
        self._children = array("i", [_NO_STATE])
        self._branches: dict[tuple[int, Hashable], int] = {}
        self._failures = array("i", [ROOT])
        self._depths = array("i", [0])
        self.longest_match = array("i", [0])
        self.num_open = array("i", [0])
        for pattern in patterns:
            self._insert(pattern)
        self._link()

    def advance(self, state: int, symbol: Hashable) -> int:
        """The state after reading `symbol` in `state`."""
        while (child := self._child(state, symbol)) == _NO_STATE:
            if state == ROOT:
                return ROOT
            state = self._failures[state]
        return child

    def matches(self, state: int) -> Iterable[int]:
        """The lengths of all patterns that end in `state`, longest first."""
        while length := self.longest_match[state]:
            yield length
            state = self._failures[self._ancestor_of_length(state, length)]

    def _ancestor_of_length(self, state: int, length: int) -> int:
        while self._depths[state] > length:
            state = self._failures[state]
        return state

    def _child(self, state: int, symbol: Hashable) -> int:
        if self._children[state] != _NO_STATE and self._symbols[state] == symbol:
            return self._children[state]
        return self._branches.get((state, symbol), _NO_STATE)

    def _insert(self, pattern: Sequence[Hashable]) -> None:
        state = ROOT
        for symbol in pattern:
            child = self._child(state, symbol)
            state = self._add(state, symbol) if child == _NO_STATE else child
        self.longest_match[state] = self._depths[state]

    def _add(self, parent: int, symbol: Hashable) -> int:
        state = len(self._depths)
        if self._children[parent] == _NO_STATE:
            self._children[parent] = state
            self._symbols[parent] = symbol
        else:
            self._branches[parent, symbol] = state
        self._symbols.append(None)
        self._children.append(_NO_STATE)
        self._failures.append(ROOT)
        self._depths.append(self._depths[parent] + 1)
        self.longest_match.append(0)
        self.num_open.append(0)
        return state

    def _link(self) -> None:
        """Set failure links breadth first: that of a state is shallower and set before it is visited."""
        others: dict[int, list[tuple[Hashable, int]]] = {}
        for (parent, symbol), child in self._branches.items():
            others.setdefault(parent, []).append((symbol, child))
        level = [ROOT]
        while level:
            deeper: list[int] = []
            for state in level:
                self._set_matches(state)
                for symbol, child in self._children_of(state, others):
                    if state != ROOT:
                        self._failures[child] = self.advance(self._failures[state], symbol)
                    deeper.append(child)
            level = deeper

    def _children_of(
        self, state: int, others: dict[int, list[tuple[Hashable, int]]]
    ) -> list[tuple[Hashable, int]]:
        if self._children[state] == _NO_STATE:
            return []
        return [(self._symbols[state], self._children[state]), *others.get(state, ())]

    def _set_matches(self, state: int) -> None:
        failure = self._failures[state]
        self.longest_match[state] = self.longest_match[state] or self.longest_match[failure]
        has_children = self._children[state] != _NO_STATE
        self.num_open[state] = self._depths[state] if has_children else self.num_open[failure]


@lru_cache(maxsize=32)
def automaton_of(patterns: tuple[str, ...]) -> PatternAutomaton:
    """The automaton of stop strings. Cached: the outputs of a request share one, and the thread that prepares
    the request builds it before the engine's thread needs it.
    """
    return PatternAutomaton(patterns)
