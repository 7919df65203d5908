"""Waits for sockets without work for idle connections.

Waitress's own loop asks every connection before each wait. This one asks a dispatcher again only after one of
its events or a call of `changed`.
"""

import select
from collections import deque
from collections.abc import Mapping
from typing import Any

from waitress import wasyncore


class Poller:
    """`dispatchers`: Waitress's servers and connections by file descriptor, maintained by Waitress."""

    def __init__(self, dispatchers: Mapping[int, Any]) -> None:
        self._dispatchers = dispatchers
        self._poll = select.poll()
        self._registered: dict[int, int] = {}
        self._changed: deque[Any] = deque()

    def changed(self, dispatcher: Any) -> None:
        """Ask `dispatcher` again which events it waits for. Any thread may call this."""
        self._changed.append(dispatcher)

    def unregister(self, fileno: int) -> None:
        """Unregister a descriptor that is about to be closed. Called by the polling thread."""
        if self._registered.pop(fileno, None) is not None:
            self._poll.unregister(fileno)

    def update_all(self) -> None:
        for dispatcher in list(self._dispatchers.values()):
            self._update(dispatcher)

    def poll(self, seconds: float) -> None:
        """Handle the sockets that are ready; wait up to `seconds` for one."""
        while self._changed:
            self._update(self._changed.popleft())
        ready = self._poll.poll(seconds * 1000)
        # An event handler may close another socket, whose descriptor a new connection may then reuse.
        owners = [self._dispatchers.get(fileno) for fileno, _ in ready]
        for (fileno, flags), dispatcher in zip(ready, owners, strict=True):
            if dispatcher is not None and self._dispatchers.get(fileno) is dispatcher:
                wasyncore.readwrite(dispatcher, flags)
                self._update(dispatcher)

    def _update(self, dispatcher: Any) -> None:
        fileno: int | None = dispatcher._fileno
        if fileno is None or self._dispatchers.get(fileno) != dispatcher:
            # It has been closed.
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
