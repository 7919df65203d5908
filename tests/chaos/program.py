"""A process of the service under test, restarted whenever it ends.

An unexpected end of a program that was healthy before is a complaint.
"""

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEALTH_SECONDS = 2.0


class Program:
    """`python -m <module>` that listens on `port`. It is healthy while the path `health` returns 200.

    Its output is appended to `log`.
    """

    def __init__(
        self, module: str, name: str, *, port: int, health: str, env: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.port = port
        self.num_starts = 0
        self.complaints: list[str] = []
        self._module = module
        self._health = health
        self._env = env
        self._log = log
        self._lock = threading.Lock()
        self._is_end_expected = False
        self._was_healthy = False
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", self._module],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.num_starts += 1
        self._is_end_expected = self._was_healthy = False

    def is_healthy(self) -> bool:
        """Whether the health check succeeds. A program that is stopped or starting is not healthy."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", self._health)
            well = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            well = False
        finally:
            connection.close()
        self._was_healthy |= well
        return well

    def restart_if_ended(self) -> None:
        """Restart the process if it has ended."""
        with self._lock:
            if self._popen is None:
                return
            status = self._popen.poll()
            if status is None:
                if not self._was_healthy:
                    self.is_healthy()
                return
            # A program that cannot start yet (its port is in use, Redis is away) is restarted again.
            if self._was_healthy and not self._is_end_expected:
                self.complaints.append(f"{self.name} ended by itself with status {status}")
            self.start()

    def kill(self, *, whole_group: bool = True) -> None:
        """Send SIGKILL, to the process or to its whole group."""
        with self._lock:
            self._is_end_expected = True
            if self._popen is not None and self._popen.poll() is None:
                (os.killpg if whole_group else os.kill)(self._popen.pid, signal.SIGKILL)
                self._popen.wait()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def expect_end(self) -> None:
        """Do not complain if the process ends before its next start."""
        with self._lock:
            self._is_end_expected = True

    def terminate(self, seconds: float, *, times: int = 1) -> None:
        """Send SIGTERM `times` times and wait. Complains about a timeout or a status other than 0."""
        with self._lock:
            if self._popen is None or self._popen.poll() is not None:
                return
            was_healthy, self._is_end_expected = self._was_healthy, True
            for _ in range(times):
                self._popen.terminate()
            try:
                status = self._popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.complaints.append(f"{self.name} did not end within {seconds:g} s of SIGTERM")
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()
                return
            if was_healthy and status != 0:
                self.complaints.append(f"{self.name} ended with status {status} after SIGTERM")

    def close(self) -> None:
        """Kill the process group, and do not restart it."""
        with self._lock:
            if self._popen is not None:
                self._is_end_expected = True
                _kill_group(self._popen.pid)
                self._popen.wait()
                self._popen = None

    def tail(self, num_characters: int = 3000) -> str:
        return self._log.read_text(errors="replace")[-num_characters:] if self._log.exists() else ""

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._popen is not None:
                self._popen.send_signal(number)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
