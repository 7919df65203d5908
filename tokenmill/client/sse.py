"""Parses server-sent events (WHATWG HTML, "Server-sent events")."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """One event: its name, its data, and the id to resume after, or ""."""

    event: str
    data: str
    id: str


def frames(lines: Iterable[bytes]) -> Iterator[Frame]:
    """The complete events of a stream. Comments are skipped, and so is an event cut off by the end."""
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
