"""`python -m tests.worker.deadly_worker`: a worker process that dies of prompts which begin with DEADLY.

`HOW` it dies: `exit` (at once, as of a crash in native code), `hang` (in a step, with the interpreter's lock
held), `lost` (its device is lost), each at the step for output token `AT`; `encode` (while a prompt is
tokenized); or of an exception of host code where `HOST_PLACES` says. Nothing of this is known to the
product.
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
from tests.worker.workshop import (
    FakeRunner,
    WordTokenizer,
    build_engine,
    new_metrics,
    next_token,
    served_model,
    wait_for_length,
)
from tokenmill.settings.processes import WorkerSettings
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
    """A bug that a request meets."""


HOST_ERRORS: dict[str, type[BaseException]] = {"": HostFault, "memory": MemoryError, "exit": SystemExit}
"""What is raised: `HOW` is `<place>` or `<place>:<name>`."""


def _is_deadly(sequence: Any) -> bool:
    return bool(sequence.token_ids[0] == DEADLY)


def break_host_code(how: str) -> None:
    """Let a method of the product fail when it meets the deadly request, as a bug in it would."""
    place, _, name = how.partition(":")
    fault = HOST_ERRORS.get(name)
    if place not in HOST_PLACES or fault is None:
        return
    owner, method, meets = HOST_PLACES[place]
    inner = getattr(owner, method)

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        outcome = inner(self, *args, **options) if place == "schedule" else None
        if meets(outcome, *args):
            raise fault(place)
        return outcome if place == "schedule" else inner(self, *args, **options)

    setattr(owner, method, broken)


HOST_PLACES: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "schedule": (
        Scheduler,
        "schedule",
        lambda made, *_: any(_is_deadly(one.sequence) for one in made.scheduled),
    ),
    "update": (
        Scheduler,
        "update",
        lambda _, made, *__: any(_is_deadly(one.sequence) for one in made.scheduled),
    ),
    "detokenize": (Engine, "_detokenize", lambda _, tokens, *__: any(map(_is_deadly, tokens))),
    "publish": (Stream, "add", lambda _, output: output.token_id == next_token([DEADLY])),
}
"""Class, method, and whether a call meets the deadly request: from what it returned, and its arguments."""


class MortalRunner(FakeRunner):
    """`client`: it dies when the log has the tokens before that step, as it would with slow steps."""

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
