"""Texts of a task's outputs on a terminal. Pure.

Law: a single text is printed as it is; several are told apart by a line before each.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenmill.protocol.messages import Event, FinishedEvent


def headline(index: int) -> str:
    return f"--- output {index} ---"


def texts(task: Mapping[str, Any]) -> str:
    """All that was written so far."""
    outputs = list(task.get("outputs") or ())
    if len(outputs) == 1:
        return str(outputs[0].get("text", ""))
    return "\n\n".join(f"{headline(one.get('index', 0))}\n{one.get('text', '')}" for one in outputs)


class Streamed:
    """Outputs as they come, one after the other: the first is shown live, the others wait for their turn."""

    def __init__(self, num_outputs: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(num_outputs)]
        self._ended = [False] * num_outputs
        self._shown = 0
        self._is_begun = False

    def take(self, event: Event) -> Iterator[str]:
        """What can be printed now."""
        self._pieces[event.index].append(event.text)
        self._ended[event.index] |= isinstance(event, FinishedEvent)
        while self._shown < len(self._pieces):
            yield from self._news()
            if not self._ended[self._shown]:
                return
            self._shown += 1
            self._is_begun = False

    def _news(self) -> Iterator[str]:
        if len(self._pieces) > 1 and not self._is_begun:
            yield ("\n\n" if self._shown else "") + headline(self._shown) + "\n"
        self._is_begun = True
        yield "".join(self._pieces[self._shown])
        self._pieces[self._shown].clear()
