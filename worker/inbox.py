"""What other threads tell the loop, in the order in which they told it. In-process only."""

import queue
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from engine.requests.engine_request import EngineRequest
from tokenmill.protocol.limits import OutputLimit
from worker.ownership import Ownership


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A claimed task with the request that the engine is to run for it.

    `prompt_field`: the field in which the client gave the prompt, for the engine's errors about it.
    `output_limit` and `sampling_defaults` (JSON) are stored with the task.
    """

    ownership: Ownership
    request: EngineRequest
    _: KW_ONLY
    prompt_field: str = "prompt"
    output_limit: OutputLimit | None = None
    sampling_defaults: str = "{}"


@dataclass(frozen=True, slots=True)
class Cancel:
    """The task was cancelled, and its readers have been told."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Discard:
    """The task is somebody else's now."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Touch nobody, until this task was tried. `heard` is set when nobody is, by a step or another thread."""

    ownership: Ownership
    heard: threading.Event


@dataclass(frozen=True, slots=True)
class RetryIsolated:
    """Prepare this task and step it alone. `prepare` gives None for one that ended without coming so far."""

    ownership: Ownership
    prepare: Callable[[], PreparedTask | None]


@dataclass(frozen=True, slots=True)
class Resume:
    """The trial of this task is over: all are stepped again."""

    ownership: Ownership


Message = PreparedTask | Cancel | Discard | Quiesce | RetryIsolated | Resume


class Inbox:
    """Many threads put, the loop takes."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def take(self, wait_seconds: float) -> list[Message]:
        """All that is there; waits for a first message up to `wait_seconds` (0: not at all)."""
        taken: list[Message] = []
        try:
            if wait_seconds:
                taken.append(self._messages.get(timeout=wait_seconds))
            while True:
                taken.append(self._messages.get_nowait())
        except queue.Empty:
            return taken
