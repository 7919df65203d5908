"""Finds stop strings in a stream of text, and lets nothing through that may be the start of one."""


class StopStrings:
    """Passes text on until the first stop string is complete; the string itself never passes.

    `matched` tells that one was found. Of several, the first that is complete counts; of those, the longest.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """What `text` sets free: up to a stop string, or up to what may become one."""
        if self.matched:
            return ""
        text, self._held = self._held + text, ""
        if (cut := self._first_match(text)) is not None:
            self.matched = True
            return text[:cut]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        free = len(text) - num_held
        self._held = text[free:]
        return text[:free]

    def close(self) -> str:
        """What was held back and is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the stop string begins that ends first in `text`."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(ends)[1] if ends else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
