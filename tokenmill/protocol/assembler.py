"""Puts the messages of one task in order, whether they come from the channel or from the log. Pure."""

from collections.abc import Iterable

from tokenmill.protocol.messages import Event, FinishedEvent


class Assembler:
    """Puts the messages of one task in order: each `seq` greater than `after` once, ascending, no gap.

    Pure: give it what the channel and the log say, in whatever order it comes. `must_read_log` says that
    the channel alone does not suffice: read the log from `last` on and give it to `replayed`.
    """

    def __init__(self, after: int = -1) -> None:
        self.last = max(after, -1)
        self.ended = False
        self.must_read_log = True

    def live(self, event: Event) -> list[Event]:
        """An event of the channel. Gives it back if it is the next one."""
        if event.seq > self.last + 1:
            self.must_read_log = True
        if event.seq != self.last + 1 or self.must_read_log:
            return []
        self._advance(event)
        return [event]

    def replayed(self, events: Iterable[Event]) -> list[Event]:
        """The log's events after `last`. Gives those that are new."""
        new = [event for event in events if event.seq > self.last]
        for event in new:
            self._advance(event)
        self.must_read_log = False
        return new

    def _advance(self, event: Event) -> None:
        self.last = event.seq
        self.ended = isinstance(event, FinishedEvent) and event.done
