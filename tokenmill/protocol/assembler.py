"""Puts the events of one task in order, from the channel and from the log."""

from collections.abc import Iterable
from typing import TypeVar

from tokenmill.protocol.messages import AnyEvent, FinishedEvent

_Event = TypeVar("_Event", bound=AnyEvent)


class Assembler:
    """Returns each event with a `seq` greater than `after` once, ascending and without gaps.

    Pass it the events of the channel and of the log as they arrive. `must_read_log`: the channel has a gap;
    read the log after `last` and pass it to `replayed`. `ended`: the last event has been returned.
    """

    def __init__(self, after: int = -1) -> None:
        self.last = max(after, -1)
        self.ended = False
        self.must_read_log = True

    def live(self, event: _Event) -> list[_Event]:
        """Take an event of the channel. Returns it if it is the next one."""
        if event.seq > self.last + 1:
            self.must_read_log = True
        if event.seq != self.last + 1 or self.must_read_log:
            return []
        self._advance(event)
        return [event]

    def replayed(self, events: Iterable[_Event]) -> list[_Event]:
        """Take the log's events after `last`. Returns those that are new."""
        new = [event for event in events if event.seq > self.last]
        for event in new:
            self._advance(event)
        self.must_read_log = False
        return new

    def _advance(self, event: AnyEvent) -> None:
        self.last = event.seq
        self.ended = isinstance(event, FinishedEvent) and event.done
