"""Parses server-sent events (WHATWG HTML, "Server-sent events")."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """One event: its name, its data, and the id to resume after, or ""."""

    event: str
    data: str
    id: str


class FrameParser:
    """Takes the bytes of a stream as they arrive. Lines end with LF or CRLF. Comments are skipped.

    An event that the end of the stream cuts off is never returned.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, list[str]] = {}

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if frame := self._take(line.decode("utf-8", "replace").rstrip("\r")):
                yield frame

    def _take(self, line: str) -> Frame | None:
        if line:
            name, _, value = line.partition(":")
            self._fields.setdefault(name, []).append(value.removeprefix(" "))
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return Frame(
            fields.get("event", ["message"])[-1], "\n".join(fields["data"]), fields.get("id", [""])[-1]
        )


def frames(chunks: Iterable[bytes]) -> Iterator[Frame]:
    """The complete events of a stream."""
    parser = FrameParser()
    for chunk in chunks:
        yield from parser.feed(chunk)
