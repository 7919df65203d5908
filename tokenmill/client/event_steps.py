"""How to follow the events of a task over HTTP, as steps for a driver to perform. No I/O here.

Invariant: every event is delivered once and in order, and none is missing, whatever happens to the
connection; the stream ends after the last event.
"""

from http import HTTPStatus

import httpx

from tokenmill.client.calls import Backoff, RetryPolicy, attempt
from tokenmill.client.errors import Broken, ClientError, NotTokenmill
from tokenmill.client.sse import Frame, FrameParser
from tokenmill.client.steps import Deliver, Pause, Receive, Request, StreamSteps
from tokenmill.protocol.messages import Event, FinishedEvent, ProtocolError, UnknownEvent, decode_any

SILENCE_SECONDS = 60.0
"""Timeout of an event stream; the service sends comments more often."""
RECONNECT_SECONDS = 1.0
"""The pause after a connection that brought no event."""
_NAMES = frozenset({"token", "end", "finished"})


def follow(path: str, after: int, policy: RetryPolicy) -> StreamSteps:
    """The steps for one task, from the event after `after` on. Raises `ClientError`.

    A driver closes the open stream when a step asks for another one, pauses or ends.
    """
    reader = _Reader(after)
    backoff = Backoff(policy, patient=True)
    while not reader.ended:
        before = reader.last
        try:
            response = yield from attempt(_request(path, before), stream=True)
        except ClientError as error:
            pause = backoff.pause(error)
        else:
            if response.status_code == HTTPStatus.NO_CONTENT:
                # The task has ended, and has no event after `last`.
                return
            backoff.reset()
            yield from _receive(reader)
            pause = Pause(0.0 if reader.last > before else RECONNECT_SECONDS)
        if not reader.ended:
            yield pause


def _request(path: str, last: int) -> Request:
    headers = {"Accept": "text/event-stream"}
    if last >= 0:
        headers["Last-Event-ID"] = str(last)
    return Request(method="GET", path=path, headers=headers, timeout=SILENCE_SECONDS)


def _receive(reader: "_Reader") -> StreamSteps:
    """Until the end of the task or of the connection."""
    parser = FrameParser()
    while not reader.ended:
        try:
            data = yield Receive()
        except httpx.HTTPError:
            return
        if not data:
            return
        if events := [event for frame in parser.feed(data) if (event := reader.take(frame))]:
            yield Deliver(events)


class _Reader:
    """Puts the frames of consecutive connections in order. `last`: the `seq` up to which all were taken."""

    def __init__(self, after: int) -> None:
        self.last = max(after, -1)
        self.ended = False

    def take(self, frame: Frame) -> Event | None:
        """The event, if it is new and of a type that this version knows. Raises `ClientError`."""
        seq, event = self._decode(frame)
        if seq is None or seq <= self.last:
            return None
        if seq > self.last + 1:
            raise Broken(f"the service left out event {self.last + 1} of the task")
        self.last = seq
        self.ended = isinstance(event, FinishedEvent) and event.done
        return event

    def _decode(self, frame: Frame) -> tuple[int | None, Event | None]:
        """The `seq`, and the event unless a newer service has added its type."""
        if frame.event not in _NAMES:
            return (int(frame.id) if frame.id.isascii() and frame.id.isdecimal() else None), None
        try:
            event = decode_any(frame.data)
        except ProtocolError as error:
            raise NotTokenmill(f"the service sends events that this client does not know: {error}") from error
        return event.seq, None if isinstance(event, UnknownEvent) else event
