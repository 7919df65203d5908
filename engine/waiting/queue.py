"""The line of waiting sequences, as long as it may be: who is next costs the same whoever waits.

Law: promoted ones first (the longest waiting before the others), then by standing, then the tenant that was
served the fewest tokens, then by arrival. A sequence that comes back takes up its old place. While several
tenants wait, a line ages from when it was last served: what one waits behind its own tenant's others is no
ground to pass another tenant's. This file orders; it takes nobody in. Only the heads of lines are looked at:
one line for each priority and tenant.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from engine.sequence import Sequence
from engine.waiting.ageing import PROMOTED, Ageing
from engine.waiting.fair_share import Sharing
from engine.waiting.lazy_heap import LazyHeap

Arrival = tuple[float, str, int]
Entry = tuple[Arrival, int, Sequence]
"""A sequence in its line, and a number that makes it another's equal never."""
Place = tuple[float, Arrival, int, "_Line"]
"""A line among those of its standing, by counter (promoted: by time), then by its head."""
Timer = tuple[float, int, "_Line"]
"""When the standing of a line's head gets better."""


_MAX_REMEMBERED = 10_000


class _Line:
    """The sequences of one priority and one tenant (or of all, where tenants do not share)."""

    __slots__ = (
        "entries", "last_served", "name", "num_waiting", "place", "priority", "served", "standing", "timer",
    )  # fmt: skip

    def __init__(self, priority: int, name: str, entries: LazyHeap[Entry]) -> None:
        self.priority = priority
        self.name = name
        self.entries = entries
        self.num_waiting = 0
        self.standing: float = priority
        self.last_served = -math.inf
        # The counter of its tenant, as it counts for its place.
        self.served = 0
        self.place: Place | None = None
        self.timer: Timer | None = None

    @property
    def head(self) -> Sequence:
        entry = self.entries.top()
        assert entry is not None, "a line with nobody in it"
        return entry[2]


class WaitingQueue:
    """Waiting sequences; `head` is who is next. Removal and return of any of them cost O(log n)."""

    def __init__(self, ageing: Ageing, sharing: Sharing) -> None:
        self._ageing = ageing
        self._sharing = sharing
        self._now = 0.0
        self._numbers = itertools.count()
        self._entries: dict[Sequence, Entry] = {}
        self._lines: dict[tuple[int, str], _Line] = {}
        self._lines_of: defaultdict[str, list[_Line]] = defaultdict(list)
        self._last_served: dict[tuple[int, str], float] = {}
        self._places: dict[float, LazyHeap[Place]] = {}
        self._timers = LazyHeap[Timer](lambda timer: timer[2].timer is timer)
        self._num_lines: Counter[int] = Counter()
        self._num_by_standing: Counter[float] = Counter()
        self._num_by_served: dict[tuple[float, int], int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def __iter__(self) -> Iterator[Sequence]:
        """All in the order in which they would go if nothing changed. O(n log n)."""
        ranked: list[tuple[tuple[float, float], Arrival, Sequence]] = []
        for line in self._lines.values():
            head, *others = sorted(line.entries)
            rank = self._rank(head[2], line)
            ranked.append((rank, head[0], head[2]))
            for arrival, _, sequence in others:
                # Nobody passes another of the same line.
                rank = max(rank, self._rank_when_head(sequence, line))
                ranked.append((rank, arrival, sequence))
        return (sequence for _, _, sequence in sorted(ranked))

    @property
    def head(self) -> Sequence | None:
        line = self._first_line()
        return line.head if line else None

    @property
    def best_priority(self) -> int:
        """The best own priority of all who wait. Raises ValueError when nobody does."""
        return min(self._num_lines)

    @property
    def is_head_promoted(self) -> bool:
        """A promoted one waits, so that the head is one."""
        return bool(self._num_by_standing[PROMOTED])

    def advance(self, now: float) -> None:
        """Let time go on; those whose standing is better now move up."""
        self._now = now
        while (timer := self._timers.top()) is not None and timer[0] <= now:
            self._put(timer[2])

    def add(self, sequence: Sequence) -> None:
        line = self._line_of(sequence)
        self._entries[sequence] = entry = (_arrival(sequence), next(self._numbers), sequence)
        line.entries.push(entry)
        line.num_waiting += 1
        self._tally(line, 1)
        if line.head is sequence:
            self._put(line)

    def take(self, sequence: Sequence) -> None:
        """It is served: out of the line, which starts to wait anew if others wait too."""
        line = self._line_of(sequence)
        was_head = line.head is sequence
        if self._sharing.is_contested:
            line.last_served = self._last_served[line.priority, line.name] = self._now
            self._forget_some()
        self.remove(sequence)
        if not was_head:
            # Its head stays, and waits anew all the same.
            self._put(line)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError when it is not in line."""
        if sequence not in self._entries:
            raise KeyError(sequence.request_id)
        line = self._line_of(sequence)
        was_head = line.head is sequence
        del self._entries[sequence]
        line.num_waiting -= 1
        self._tally(line, -1)
        if not line.num_waiting:
            self._close(line)
        elif was_head:
            self._put(line)

    def served(self, name: str) -> None:
        """The counter of the lines of this name may have changed; their places change when it matters."""
        if name not in self._lines_of:
            return
        counter, num_by_served = self._sharing.counter(name), self._num_by_served
        for line in self._lines_of[name]:
            if counter == line.served or line.standing == PROMOTED:
                continue
            before, after = (line.standing, line.served), (line.standing, counter)
            num_left = num_by_served.pop(before) - line.num_waiting
            if num_left:
                num_by_served[before] = num_left
            num_by_served[after] = num_by_served.get(after, 0) + line.num_waiting
            line.served = counter

    def yields_to_another_tenant(self, sequence: Sequence) -> bool:
        """Whether the head, of the same standing, goes first as its tenant was served fewer tokens."""
        first, line = self._first_line(), self._line_of(sequence)
        return first is not None and first.standing == line.standing and first.served < line.served

    @property
    def num_yielding(self) -> int:
        """How many `yields_to_another_tenant`."""
        first = self._first_line()
        if first is None:
            return 0
        return self._num_by_standing[first.standing] - self._num_by_served.get(
            (first.standing, first.served), 0
        )

    def _line_of(self, sequence: Sequence) -> _Line:
        name = self._sharing.line(sequence.tenant)
        line = self._lines.get((sequence.priority, name))
        if line is None:
            entries = LazyHeap[Entry](lambda entry: self._entries.get(entry[2]) is entry)
            line = self._lines[sequence.priority, name] = _Line(sequence.priority, name, entries)
            line.last_served = self._last_served.get((sequence.priority, name), -math.inf)
            line.served = self._sharing.counter(name)
            self._lines_of[name].append(line)
            self._num_lines[sequence.priority] += 1
        return line

    def _first_line(self) -> _Line | None:
        for standing in sorted(self._places):
            places = self._places[standing]
            while (place := places.top()) is not None:
                line = place[3]
                if standing == PROMOTED or place[0] == line.served:
                    return line
                # It was served since it took this place.
                line.place = (line.served, place[1], next(self._numbers), line)
                places.replace_top(line.place)
            del self._places[standing]
        return None

    def _put(self, line: _Line) -> None:
        """Give `line` the place that is due to its head."""
        head = line.head
        self._tally(line, -line.num_waiting)
        line.standing, key = self._rank(head, line)
        line.served = 0 if line.standing == PROMOTED else int(key)
        self._tally(line, line.num_waiting)
        number = next(self._numbers)
        line.place = (key, _arrival(head), number, line)
        if line.standing not in self._places:
            self._places[line.standing] = LazyHeap(_is_current)
        self._places[line.standing].push(line.place)
        since = max(head.waiting_since, line.last_served)
        better_at = self._ageing.next_change(line.priority, since, self._now)
        line.timer = (better_at, number, line)
        if better_at < math.inf:
            self._timers.push(line.timer)

    def _rank(self, sequence: Sequence, line: _Line) -> tuple[float, float]:
        since = max(sequence.waiting_since, line.last_served)
        standing = self._ageing.standing(line.priority, since, self._now)
        return standing, since if standing == PROMOTED else self._sharing.counter(line.name)

    def _rank_when_head(self, sequence: Sequence, line: _Line) -> tuple[float, float]:
        """As far as it can be told now: those before it will have been served by then."""
        if self._sharing.is_contested:
            return line.priority, self._sharing.counter(line.name)
        return self._rank(sequence, line)

    def _tally(self, line: _Line, num_more: int) -> None:
        """So many more are in `line`, as it stands."""
        self._num_by_standing[line.standing] += num_more
        num_by_served, key = self._num_by_served, (line.standing, line.served)
        if num := num_by_served.get(key, 0) + num_more:
            num_by_served[key] = num
        else:
            num_by_served.pop(key, None)

    def _forget_some(self) -> None:
        """What was served longer ago than anybody waits for a promotion says nothing any more."""
        if len(self._last_served) > _MAX_REMEMBERED + 2 * len(self._lines):
            since = self._now - self._ageing.longest_seconds
            self._last_served = {key: time for key, time in self._last_served.items() if time > since}

    def _close(self, line: _Line) -> None:
        line.place = line.timer = None
        del self._lines[line.priority, line.name]
        self._num_lines[line.priority] -= 1
        if not self._num_lines[line.priority]:
            del self._num_lines[line.priority]
        self._lines_of[line.name].remove(line)
        if not self._lines_of[line.name]:
            del self._lines_of[line.name]


def _is_current(place: Place) -> bool:
    return place[3].place is place


def _arrival(sequence: Sequence) -> Arrival:
    """Its order among those of one standing: what it was before it aged counts no more."""
    return sequence.order[1:]
