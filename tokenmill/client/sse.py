"""Server-sent events, from lines to frames (WHATWG HTML, "Server-sent events"). Pure.

Knows no connection, and nothing of what a frame carries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """One event: its name, its data and the id to resume after ("" if it has none)."""

    event: str
    data: str
    id: str


def frames(lines: Iterable[bytes]) -> Iterator[Frame]:
    """The complete events of a stream; comments are dropped, and so is what a broken line began."""
    fields: dict[str, list[str]] = {}
    for raw in lines:
        if not raw.endswith(b"\n"):
            return
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line:
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        else:
            if "data" in fields:
                event, last_id = fields.get("event", ["message"])[-1], fields.get("id", [""])[-1]
                yield Frame(event, "\n".join(fields["data"]), last_id)
            fields = {}
