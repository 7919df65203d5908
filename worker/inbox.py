"""What other threads tell the loop, in the order in which they told it. In-process only."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.requests.deadlines import NO_DEADLINES, Deadlines, ResumedOutput
from engine.sampling_params import SamplingParams
from tokenmill.protocol.naming import DEFAULT_TENANT
from tokenmill.protocol.sizes import OutputLimit
from worker.ownership import Ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A claimed request, ready for the engine.

    `resumed`: what earlier attempts published. `prompt_field`: how the client gave the prompt, for the errors
    that the engine finds in it. `accepted_at`: epoch seconds; `waited_seconds` since then, and `deadlines`
    count from then. `tenant`: as the scheduler tells tenants apart. `output_limit`, `sampling_defaults`
    (JSON): what the task is said to be run with.
    """

    ownership: Ownership
    prompt_token_ids: list[int]
    params: SamplingParams
    accepted_at: float
    prompt_field: str = "prompt"
    priority: int = 2
    tenant: str = DEFAULT_TENANT
    cache_salt: bytes = b""
    deadlines: Deadlines = NO_DEADLINES
    resumed: tuple[ResumedOutput, ...] = ()
    waited_seconds: float = 0.0
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
    prepare: Callable[[], EngineRequest | None]


@dataclass(frozen=True, slots=True)
class Resume:
    """The trial of this task is over: all are stepped again."""

    ownership: Ownership


Message = EngineRequest | Cancel | Discard | Quiesce | RetryIsolated | Resume


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
