"""`python -m tests.tokenmill.serve.hanging_worker`: a real worker whose steps hang when a test asks for it.

The runner of the model is wrapped before the worker is built. The next step after the file `HANG_FILE`
appears does what the file says: `holding-gil` hangs in native code that holds the interpreter's lock,
`releasing-gil` in native code that releases it, `until <path>` waits until that file exists.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from tokenmill.cli import main as cli
from tokenmill.serve import service as serve

HANG_SECONDS = 10_000
POLL_SECONDS = 0.05
SERVE = "from tests.tokenmill.serve.hanging_worker import serve_hanging; serve_hanging()"
"""The program of a `tokenmill serve` with such a worker."""


def hang_next_step(path: Path, how: str) -> None:
    """For the worker whose `HANG_FILE` is `path`."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(how)
    unfinished.rename(path)


class HangingRunner:
    """Looks for `path` before each step of `runner`."""

    def __init__(self, runner: Any, path: Path) -> None:
        self._runner = runner
        self._path = path

    def execute(self, outputs: Any) -> Any:
        if outputs.scheduled and self._path.exists():
            how = self._path.read_text()
            # Once: the restarted worker must not find it.
            self._path.unlink()
            _hang(*how.split())
        return self._runner.execute(outputs)

    def check(self) -> None:
        self._runner.check()

    def release_memory(self) -> bool:
        return bool(self._runner.release_memory())


def _hang(how: str, path: str = "") -> None:
    if how == "holding-gil":
        ctypes.PyDLL(None).sleep(HANG_SECONDS)
    elif how == "releasing-gil":
        ctypes.CDLL(None).sleep(HANG_SECONDS)
    else:
        while not Path(path).exists():
            time.sleep(POLL_SECONDS)


def serve_hanging() -> None:
    """`tokenmill serve` with this worker."""
    original = serve.process_command
    command = (sys.executable, "-m", __name__)
    serve.process_command = lambda name: command if name == "worker" else original(name)
    cli.main()


def main() -> int:
    # Not at the top: the supervisor imports this file too, and these imports take seconds.
    from engine.execution import build
    from worker import __main__ as worker

    path, build_original = Path(os.environ["HANG_FILE"]), build.build_execution

    def build_hanging(*args: Any, **options: Any) -> Any:
        execution = build_original(*args, **options)
        object.__setattr__(execution, "runner", HangingRunner(execution.runner, path))
        return execution

    build.build_execution = build_hanging
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
