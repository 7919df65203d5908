"""Events as server-sent events (WHATWG HTML, "Server-sent events"). Pure.

Law: the `id` of a frame is the `seq` of its event, so that a client that reconnects goes on behind it.
"""

from collections.abc import Iterable

from tokenmill.protocol.messages import Event, TokenEvent, encode

HEARTBEAT = b": \n\n"
RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a client reconnects; sent first."""
GOODBYE = b": the server stops; reconnect to go on\n\n"


def frames(events: Iterable[Event]) -> bytes:
    return b"".join(frame(event) for event in events)


def frame(event: Event) -> bytes:
    """`event: token`, `event: end` for the end of one output, `event: finished` for the end of the task."""
    return f"id: {event.seq}\nevent: {_name(event)}\ndata: {encode(event)}\n\n".encode()


def _name(event: Event) -> str:
    if isinstance(event, TokenEvent):
        return "token"
    return "finished" if event.done else "end"
