"""Waits for sockets, at a cost for each idle connection that is the system's alone.

Waitress's own loop asks every connection before each wait. Here a dispatcher is asked again after each of its
events, and when it was named to `changed`.
"""

import select
from collections import deque
from collections.abc import Mapping
from typing import Any

from waitress import wasyncore


class Poller:
    """`dispatchers`: those of Waitress by file descriptor, as its servers and connections keep them."""

    def __init__(self, dispatchers: Mapping[int, Any]) -> None:
        self._dispatchers = dispatchers
        self._poll = select.poll()
        self._registered: dict[int, int] = {}
        self._changed: deque[Any] = deque()

    def changed(self, dispatcher: Any) -> None:
        """What `dispatcher` waits for may be something else now. Called by any thread."""
        self._changed.append(dispatcher)

    def forget(self, fileno: int) -> None:
        """The descriptor is about to be closed. Called by the thread that polls."""
        if self._registered.pop(fileno, None) is not None:
            self._poll.unregister(fileno)

    def update_all(self) -> None:
        for dispatcher in list(self._dispatchers.values()):
            self._update(dispatcher)

    def poll(self, seconds: float) -> None:
        """Handle what is ready; waits up to `seconds` for something."""
        while self._changed:
            self._update(self._changed.popleft())
        ready = self._poll.poll(seconds * 1000)
        # One of them may close another, and a new connection then gets its descriptor, but not its event.
        owners = [self._dispatchers.get(fileno) for fileno, _ in ready]
        for (fileno, flags), dispatcher in zip(ready, owners, strict=True):
            if dispatcher is not None and self._dispatchers.get(fileno) is dispatcher:
                wasyncore.readwrite(dispatcher, flags)
                self._update(dispatcher)

    def _update(self, dispatcher: Any) -> None:
        fileno: int | None = dispatcher._fileno
        if fileno is None or self._dispatchers.get(fileno) != dispatcher:
            # It was closed meanwhile.
            return
        wanted = select.POLLIN | select.POLLPRI if dispatcher.readable() else 0
        if dispatcher.writable() and not dispatcher.accepting:
            wanted |= select.POLLOUT
        known = self._registered.get(fileno)
        if known is None:
            self._poll.register(fileno, wanted)
        elif known != wanted:
            self._poll.modify(fileno, wanted)
        self._registered[fileno] = wanted
