"""`python -m tests.tokenmill.hanging_worker`: a real worker, one of whose steps takes as long as a test says.

The product has no place to ask for that: the model's runner is wrapped before the worker is put together.
The next step after the file `HANG_FILE` appears does what the file says: `holding` stands in native code that
keeps the interpreter's lock, `free` in code that gives it away, `until <path>` goes on once that file exists.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from tokenmill.cli import main as cli
from tokenmill.serve import service as serve

FOR_EVER = 10_000
POLL_SECONDS = 0.05
SERVE = "from tests.tokenmill.serve.hanging_worker import serve_hanging; serve_hanging()"
"""The program of a `tokenmill serve` with such a worker."""


def ask_for(path: Path, what: str) -> None:
    """Let the next step of the worker whose `HANG_FILE` is `path` do `what`."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(what)
    unfinished.rename(path)


class HangingRunner:
    """`runner`, and a look at `path` before each step."""

    def __init__(self, runner: Any, path: Path) -> None:
        self._runner = runner
        self._path = path

    def execute(self, outputs: Any) -> Any:
        if outputs.scheduled and self._path.exists():
            what = self._path.read_text()
            # Once: the worker that is started again must not find it.
            self._path.unlink()
            _hang(*what.split())
        return self._runner.execute(outputs)

    def check(self) -> None:
        self._runner.check()

    def release_memory(self) -> bool:
        return bool(self._runner.release_memory())


def _hang(how: str, path: str = "") -> None:
    if how == "holding":
        ctypes.PyDLL(None).sleep(FOR_EVER)
    elif how == "free":
        ctypes.CDLL(None).sleep(FOR_EVER)
    else:
        while not Path(path).exists():
            time.sleep(POLL_SECONDS)


def serve_hanging() -> None:
    """`tokenmill serve`, whose other processes are the usual ones."""
    usual = serve.process_command
    ours = (sys.executable, "-m", __name__)
    serve.process_command = lambda name: ours if name == "worker" else usual(name)
    cli.main()


def main() -> int:
    # Not above: the supervisor imports this file too, and these take seconds.
    from engine.execution import build
    from worker import __main__ as worker

    path, build_usual = Path(os.environ["HANG_FILE"]), build.build_execution

    def build_hanging(*args: Any, **options: Any) -> Any:
        execution = build_usual(*args, **options)
        object.__setattr__(execution, "runner", HangingRunner(execution.runner, path))
        return execution

    build.build_execution = build_hanging
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
