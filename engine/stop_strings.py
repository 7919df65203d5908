"""Finds stop strings in a stream of text, and lets nothing through that may be the start of one."""


class StopStrings:
    """Passes text on until the first stop string is complete; `is_included`: up to its end, else its start.

    `matched` tells that one was found. Of several, the first that is complete counts; of those, the longest.
    """

    def __init__(self, stop: tuple[str, ...], *, is_included: bool = False) -> None:
        self._stop = stop
        self._is_included = is_included
        self._held = ""
        self.matched = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What `text` sets free: up to a stop string, or up to what may become one.

        Without `may_stop`, a stop string that `text` completes is text like any other.
        """
        if self.matched:
            return ""
        num_old = len(self._held)
        text, self._held = self._held + text, ""
        if may_stop and (cut := self._first_match(text, num_old)) is not None:
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

    def _first_match(self, text: str, num_old: int) -> int | None:
        """Where the stop string that is complete first, beyond `num_old` characters, cuts `text`."""
        starts = ((text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stop)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return end if self._is_included else start


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
