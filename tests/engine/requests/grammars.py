"""Scripted grammars and a scripted compiler."""

from collections.abc import Callable

from engine.constraints import Grammar
from engine.structured_outputs import StructuredOutputs

MAKE = Callable[[], Grammar]


class Countdown:
    """A grammar of exactly `length` tokens, none of which is 666."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.shown: list[int] = []

    def advance(self, token_ids: list[int]) -> None:
        assert token_ids[: len(self.shown)] == self.shown, "another output's tokens"
        self.shown = list(token_ids)
        if 666 in token_ids:
            raise ValueError("no such word")

    def fill_bitmask(self, row: object) -> None:
        """Masks nothing."""

    @property
    def is_complete(self) -> bool:
        return len(self.shown) >= self.length


class ScriptedCompiler:
    """Finishes compilations when a test calls `finish`."""

    def __init__(self) -> None:
        self.submitted: dict[str, StructuredOutputs] = {}
        self.ready: list[tuple[str, MAKE | str]] = []
        self.num_waits = 0
        self.on_wait: Callable[[], None] = lambda: None

    def submit(self, key: str, structured_outputs: StructuredOutputs) -> None:
        assert key not in self.submitted
        self.submitted[key] = structured_outputs

    def pop_ready(self) -> list[tuple[str, MAKE | str]]:
        ready, self.ready = self.ready, []
        return ready

    def cancel(self, key: str) -> None:
        self.submitted.pop(key, None)
        self.ready = [(one, compiled) for one, compiled in self.ready if one != key]

    def wait(self, seconds: float) -> None:
        assert 0 < seconds < 0.1
        self.num_waits += 1
        self.on_wait()

    def finish(self, compiled: MAKE | str) -> None:
        """Finish everything submitted with `compiled`."""
        self.ready += [(key, compiled) for key in self.submitted]
        self.submitted.clear()
