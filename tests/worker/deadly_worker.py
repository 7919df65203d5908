"""`python -m tests.worker.deadly_worker`: a worker process that dies of prompts which begin with DEADLY.

`HOW` it dies: `exit` (at once, as of a crash in native code), `hang` (in a step, with the interpreter's lock
held), `lost` (its device is lost), each at the step for output token `AT`; or `encode` (while a prompt is
tokenized). Nothing of this is known to the product.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from engine.errors import DeviceLost
from engine.outputs import SchedulerOutputs
from tests.worker.workshop import (
    FakeRunner,
    WordTokenizer,
    build_engine,
    new_metrics,
    served_model,
    wait_for_length,
)
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.crew import Surroundings
from worker.settings import WorkerSettings

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
                DEATHS[os.environ["HOW"]]()
        super().execute(outputs)


class MortalTokenizer(WordTokenizer):
    def encode(self, text: str) -> list[int]:
        if text == DEADLY_TEXT:
            DEATHS[os.environ["HOW"]]()
        return super().encode(text)


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    settings = WorkerSettings.from_env(os.environ)
    given = Surroundings(
        connect=lambda thread: connect(settings.redis_url, thread),
        metrics=new_metrics(),
        timing=settings.timing,
    )
    model = served_model(MortalTokenizer())
    runner = MortalRunner(connect(settings.redis_url, "test"))
    worker = BatchWorker(build_engine(runner, max_num_seqs=4), model, given)
    worker.handle_signals()
    return worker.work()


if __name__ == "__main__":
    os._exit(main())
