"""`python -m tests.worker.deadly_worker`: a worker process that dies of prompts that begin with DEADLY.

`HOW` it dies: `exit` (at once, like a crash in native code), `hang` (in a step that holds the interpreter's
lock), `lost` (the device is lost), each at the step for output token `AT`; `encode` (while it tokenizes a
prompt), `stuck` (waiting while it tokenizes); or an exception in one of `HOST_PLACES`.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from engine.engine import Engine
from engine.errors import DeviceLost
from engine.outputs import SchedulerOutputs
from engine.scheduling.scheduler import Scheduler
from tests.worker.fakes import (
    FakeRunner,
    WordTokenizer,
    build_engine,
    new_metrics,
    next_token,
    served_model,
    wait_for_length,
)
from tokenmill.settings.declarations import WorkerSettings
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext
from worker.stream import Stream

DEADLY = 666
DEADLY_TEXT = "BOOM"
EXIT_DEADLY = 9


def hang() -> None:
    re.match(r"(a|a)*$", "a" * 60 + "b")


def lose_device() -> None:
    raise DeviceLost("an illegal memory access was encountered")


DEATHS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(EXIT_DEADLY),
    "encode": lambda: os._exit(EXIT_DEADLY),
    "stuck": lambda: threading.Event().wait(),
    "hang": hang,
    "lost": lose_device,
}


class HostFault(Exception):
    """A bug that the deadly request triggers."""


HOST_ERRORS: dict[str, type[BaseException]] = {"": HostFault, "memory": MemoryError, "exit": SystemExit}
"""The error to raise, by the second part of `HOW`, which is `<place>` or `<place>:<name>`."""


def _is_deadly(sequence: Any) -> bool:
    return bool(sequence.token_ids[0] == DEADLY)


def _schedules_deadly(outputs: SchedulerOutputs) -> bool:
    return any(_is_deadly(one.sequence) for one in outputs.scheduled)


HOST_PLACES: dict[str, tuple[type, tuple[str, ...], Callable[..., bool]]] = {
    "schedule": (Scheduler, ("schedule", "schedule_isolated"), _schedules_deadly),
    "update": (Scheduler, ("update",), lambda outputs, *_: _schedules_deadly(outputs)),
    "detokenize": (Engine, ("_detokenize",), lambda tokens: any(map(_is_deadly, tokens))),
    "publish": (Stream, ("add",), lambda output: output.token_id == next_token([DEADLY])),
}
"""Class, methods, and whether a call concerns the deadly request: by its result for `schedule`, else by its
arguments.
"""


def break_host_code(how: str) -> None:
    """Let methods raise when they meet the deadly request, as a bug in them would."""
    place, _, name = how.partition(":")
    if place in HOST_PLACES and name in HOST_ERRORS:
        owner, methods, _ = HOST_PLACES[place]
        for method in methods:
            setattr(owner, method, _broken(getattr(owner, method), place, HOST_ERRORS[name]))


def _broken(method: Callable[..., Any], place: str, error: type[BaseException]) -> Callable[..., Any]:
    _, _, is_deadly = HOST_PLACES[place]

    def broken(self: Any, *args: Any) -> Any:
        if place == "schedule":
            outputs = method(self, *args)
            if is_deadly(outputs):
                raise error(place)
            return outputs
        if is_deadly(*args):
            raise error(place)
        return method(self, *args)

    return broken


class MortalRunner(FakeRunner):
    """Dies once the log has all tokens before step `AT`, as with slow steps."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def execute(self, outputs: SchedulerOutputs) -> None:
        at = int(os.environ["AT"])
        for item in outputs.scheduled:
            sequence = item.sequence
            if sequence.token_ids[0] == DEADLY and sequence.num_output_tokens >= at:
                task_id, _, _ = sequence.request_id.partition(":")
                wait_for_length(self._client, task_id, at)
                DEATHS.get(os.environ["HOW"], lambda: None)()
        super().execute(outputs)


class MortalTokenizer(WordTokenizer):
    def encode(self, text: str) -> list[int]:
        if text == DEADLY_TEXT:
            DEATHS[os.environ["HOW"]]()
        return super().encode(text)


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    break_host_code(os.environ["HOW"])
    settings = WorkerSettings.load(os.environ)
    context = WorkerContext(
        model=served_model(MortalTokenizer()),
        connect=lambda thread: connect(settings.redis_url, thread),
        metrics=new_metrics(),
        timing=settings,
    )
    runner = MortalRunner(connect(settings.redis_url, "test"))
    worker = BatchWorker(build_engine(runner, max_num_seqs=4), context)
    worker.handle_signals()
    return worker.work()


if __name__ == "__main__":
    os._exit(main())
