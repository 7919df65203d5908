"""Formats events as server-sent events (WHATWG HTML, "Server-sent events").

The `id` of a frame is the `seq` of its event, so a client that reconnects resumes after it.
"""

from collections.abc import Iterable

from tokenmill.protocol.messages import Event, TokenEvent, encode

HEARTBEAT = b": \n\n"
RETRY = b"retry: 1000\n\n"
"""Milliseconds before a client reconnects. Sent first."""
DAMAGED = (
    b'event: error\ndata: {"code":"internal_error","message":"the events of this task cannot be read; '
    b'the log of this service says why"}\n\n'
)
"""Ends a stream whose log cannot be read."""
SHUTDOWN_COMMENT = b": the server is stopping; reconnect to resume\n\n"


def frames(events: Iterable[Event]) -> bytes:
    return b"".join(frame(event) for event in events)


def frame(event: Event) -> bytes:
    """`event: token`; `event: end` when one output ends; `event: finished` when the task ends."""
    return f"id: {event.seq}\nevent: {_name(event)}\ndata: {encode(event)}\n\n".encode()


def _name(event: Event) -> str:
    if isinstance(event, TokenEvent):
        return "token"
    return "finished" if event.done else "end"
