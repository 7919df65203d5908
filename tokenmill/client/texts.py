"""Formats the texts of a task for a terminal. If there are several, each has a headline."""

from collections.abc import Iterator

from tokenmill.client.replies import TaskFields
from tokenmill.protocol.messages import Event, FinishedEvent


def texts(task: TaskFields) -> str:
    """The texts of a task so far."""
    if len(task.outputs) == 1:
        return task.text
    return "\n\n".join(f"{_headline(output.index)}\n{output.text}" for output in task.outputs)


class StreamedTexts:
    """Texts while they are generated. The first unfinished output is printed live; later ones are held until
    it has ended.
    """

    def __init__(self, num_outputs: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(num_outputs)]
        self._ended = [False] * num_outputs
        self._current = 0
        self._has_headline = False

    def add(self, event: Event) -> Iterator[str]:
        """Yield what can be printed now."""
        self._pieces[event.index].append(event.text)
        self._ended[event.index] |= isinstance(event, FinishedEvent)
        while self._current < len(self._pieces):
            yield from self._new_text()
            if not self._ended[self._current]:
                return
            self._current += 1
            self._has_headline = False

    def _new_text(self) -> Iterator[str]:
        if len(self._pieces) > 1 and not self._has_headline:
            yield ("\n\n" if self._current else "") + _headline(self._current) + "\n"
        self._has_headline = True
        yield "".join(self._pieces[self._current])
        self._pieces[self._current].clear()


def _headline(index: int) -> str:
    return f"--- output {index} ---"
