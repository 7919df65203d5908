"""Messages from the worker's other threads to the loop, in order."""

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
    """The task was cancelled; its event stream has ended already."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Discard:
    """Another worker owns the task now."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Stop stepping requests until this task has been retried alone.

    `heard` is set once no request is being stepped, on the device or in a thread that compiles grammars.
    """

    ownership: Ownership
    heard: threading.Event


@dataclass(frozen=True, slots=True)
class RetryIsolated:
    """Prepare this task and step it alone. `prepare` returns None if the task ends before it is prepared."""

    ownership: Ownership
    prepare: Callable[[], PreparedTask | None]


@dataclass(frozen=True, slots=True)
class Resume:
    """The isolated retry of this task is over: step all requests again."""

    ownership: Ownership


Message = PreparedTask | Cancel | Discard | Quiesce | RetryIsolated | Resume


class Inbox:
    """A queue of messages from several threads to the loop."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def __len__(self) -> int:
        return self._messages.qsize()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def take(self, wait_seconds: float) -> list[Message]:
        """All messages in the queue; waits up to `wait_seconds` for the first one (0: does not wait)."""
        taken: list[Message] = []
        try:
            if wait_seconds:
                taken.append(self._messages.get(timeout=wait_seconds))
            while True:
                taken.append(self._messages.get_nowait())
        except queue.Empty:
            return taken
