"""Runs `tokenmill serve` as a process, with the real worker and API or with small fakes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import free_port
from tests.tokenmill.serve.children import TIMEOUT_SECONDS, Lines
from tokenmill.serve.state_directory import StateDirectory
from tokenmill.settings.declarations import VARIABLES

ROOT = Path(__file__).parent.parent.parent.parent
REAL = "from tokenmill.cli.main import main; main()"
WITH_FAKES = "from tests.tokenmill.serve.served import main; main()"

_FAKE_WORKER = """
import os, signal, sys, time
def stop(*_):
    print('bye', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if os.environ.get('TOKENMILL_MODEL') == 'unsupported':
    print('no such model')
    sys.exit(78)
if 'CUDA_VISIBLE_DEVICES' in os.environ:
    print('device', os.environ['CUDA_VISIBLE_DEVICES'])
print('model', os.environ.get('TOKENMILL_MODEL'), 'redis', os.environ['REDIS_URL'], flush=True)
time.sleep(600)
"""
_FAKE_API = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
def stop(*_):
    print('bye', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
Server(('127.0.0.1', int(os.environ['TOKENMILL_PORT'])), Handler).serve_forever(0.05)
"""


def main() -> None:
    """`tokenmill serve` with the fakes."""
    from tokenmill.cli import main as cli
    from tokenmill.serve import cuda_devices
    from tokenmill.serve import service as serve

    if os.environ.get("FAKE_CUDA"):
        cuda_devices.torch_has_cuda = lambda: True
    codes = {"worker": _FAKE_WORKER, "api": _FAKE_API}
    serve.process_command = lambda name: (sys.executable, "-c", codes[name])
    cli.main()


class Served:
    """A running `tokenmill serve` in `directory`. `program`: REAL or WITH_FAKES.

    `within`: a command that executes the one appended to it.
    """

    def __init__(
        self,
        directory: Path,
        program: str,
        settings: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.lines = Lines()
        self.port = free_port()
        variables = {
            "TOKENMILL_PORT": str(self.port),
            "TOKENMILL_METRICS_PORT": "0",
            # Not in `directory`: compiled operators are kept for all tests.
            "TOKENMILL_CACHE_DIR": str(ROOT / ".tokenmill"),
            **(settings or {}),
        }
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self.process = subprocess.Popen(
            [*within, sys.executable, "-c", program, "serve"],
            cwd=directory,
            env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.state = StateDirectory(directory / variables.get("TOKENMILL_STATE_DIR", ".tokenmill"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> "Served":
        self.lines.wait_for("  curl -s ")
        return self

    def signal(self, number: int) -> None:
        """Signal the supervisor's process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the exit. Returns its code; all lines have been read."""
        code = self.process.wait(TIMEOUT_SECONDS)
        self._reader.join(TIMEOUT_SECONDS)
        return code

    def text(self) -> list[str]:
        return [line for _, line in self.lines.seen]

    def end(self) -> None:
        """Stop everything, whatever its state."""
        if self.process.poll() is None:
            self.signal(signal.SIGINT)
            try:
                self.process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in self.state.processes().values():
            if process.is_alive() and process.pid != os.getpid():
                os.kill(process.pid, signal.SIGKILL)
        self.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.lines("", line.decode().rstrip("\n"))
