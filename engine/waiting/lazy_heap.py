"""A heap whose entries may die where they lie.

Law: the least living entry is at the top; the dead are dropped when they come up, or when they may be the
majority, so that they cost no more than they did while they lived. Does not know what an entry means.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[object, ...])

_SMALL = 32


class LazyHeap(Generic[Entry]):
    """Entries in order, least first; `is_alive` tells which still count. No two may compare equal."""

    def __init__(self, is_alive: Callable[[Entry], bool]) -> None:
        self._is_alive = is_alive
        self._entries: list[Entry] = []
        self._sweep_at = _SMALL

    def __iter__(self) -> Iterator[Entry]:
        """The living, in no order."""
        return filter(self._is_alive, self._entries)

    @property
    def num_kept(self) -> int:
        """The living and those of the dead that were not dropped yet."""
        return len(self._entries)

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._entries, entry)
        if len(self._entries) > self._sweep_at:
            self._entries = list(self)
            heapq.heapify(self._entries)
            self._sweep_at = max(_SMALL, 2 * len(self._entries))

    def top(self) -> Entry | None:
        """The least living entry, which stays; None if there is none."""
        entries = self._entries
        while entries:
            if self._is_alive(entries[0]):
                return entries[0]
            heapq.heappop(entries)
        return None

    def replace_top(self, entry: Entry) -> None:
        """Put `entry` in the place of the top, which has died."""
        heapq.heapreplace(self._entries, entry)
