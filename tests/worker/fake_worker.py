"""`python -m tests.worker.fake_worker`: a worker process with a fake model, controlled by the environment.

With `GATED=1` each step waits for a permit in the Redis list `test:permits`. With `HANG=<step>` that step
never returns from native code that keeps the interpreter's lock. `DIE=<thread>:<n>:<when>` kills the process
with SIGKILL at the n-th script (from 0) that this thread calls, `before` it is sent or `after` its reply.
Timing comes from the usual settings.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.worker.fakes import FakeRunner, build_engine, new_metrics, served_model
from tokenmill.settings.declarations import WorkerSettings
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext

PERMITS = "test:permits"


def gate(url: str) -> Callable[[], None]:
    client = connect(url, "gate")

    def wait() -> None:
        while client.blpop([PERMITS], timeout=1) is None:
            pass

    return wait


def hang_at(runner: FakeRunner, number: int) -> Callable[[], None]:
    def hang() -> None:
        if runner.num_steps == number:
            re.match(r"(a|a)*$", "a" * 60 + "b")

    return hang


def mortal(client: Any, plan: str, thread: str) -> Any:
    """`client`, which kills the process at the call that `plan` names."""
    victim, number, when = plan.split(":")
    if victim != thread:
        return client
    call, num_answered = client.execute_command, 0

    def execute(*args: Any, **options: Any) -> Any:
        nonlocal num_answered
        is_last = args[0] == "EVALSHA" and num_answered == int(number)
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        # A script that the server does not have yet raises here and is sent again.
        reply = call(*args, **options)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        num_answered += args[0] == "EVALSHA"
        return reply

    client.execute_command = execute
    return client


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    settings = WorkerSettings.load(os.environ)
    runner = FakeRunner()
    if os.environ.get("GATED"):
        runner.before_step = gate(settings.redis_url)
    if step := os.environ.get("HANG"):
        runner.before_step = hang_at(runner, int(step))
    plan = os.environ.get("DIE", "none:0:before")
    context = WorkerContext(
        model=served_model(),
        connect=lambda thread: mortal(connect(settings.redis_url, thread), plan, thread),
        metrics=new_metrics(),
        timing=settings,
    )
    worker = BatchWorker(build_engine(runner, max_num_seqs=4), context)
    worker.handle_signals()
    return worker.work()


if __name__ == "__main__":
    os._exit(main())
