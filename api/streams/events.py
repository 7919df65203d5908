"""Events as server-sent events (WHATWG HTML, "Server-sent events"). Pure.

Law: the `id` of a frame is the `seq` of its event, so that a client that reconnects goes on behind it.
"""

import json
from collections.abc import Iterable

from tokenmill.protocol.messages import VERSION, Event, TokenEvent

HEARTBEAT = b": \n\n"
RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a client reconnects; sent first."""
GOODBYE = b": the server stops; reconnect to go on\n\n"


def frames(events: Iterable[Event]) -> bytes:
    return b"".join(frame(event) for event in events)


def frame(event: Event) -> bytes:
    """`event: token`, `event: end` for the end of one output, `event: finished` for the end of the task."""
    return f"id: {event.seq}\nevent: {_name(event)}\ndata: {message(event)}\n\n".encode()


def _name(event: Event) -> str:
    if isinstance(event, TokenEvent):
        return "token"
    return "finished" if event.done else "end"


def message(event: Event) -> str:
    """The event as it was published, on one line."""
    members: dict[str, object] = {"v": VERSION, "id": event.id, "seq": event.seq, "index": event.index}
    if isinstance(event, TokenEvent):
        members |= {"token": event.token, "text": event.text, **_logprobs(event)}
    else:
        members |= {"token": None, "text": event.text, "finish_reason": event.finish_reason}
        if event.done:
            members |= {"done": True, "usage": event.usage, "error": event.error}
        elif event.error:
            members["error"] = event.error
    return json.dumps(members, ensure_ascii=False, separators=(",", ":"))


def _logprobs(event: TokenEvent) -> dict[str, object]:
    """Where they were asked for."""
    given = {"logprobs": event.logprobs, "prompt_logprobs": event.prompt_logprobs}
    return {name: value for name, value in given.items() if value is not None}
