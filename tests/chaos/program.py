"""One process of the service under test, started again whenever it ends, as a supervisor does.

Law: an end that nobody wanted, of a program that had once been ready, is a complaint. Knows only how a
program is started, asked whether it is well, and signalled.
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
    """`python -m <module>` that listens on `port`; it is well while the path `health` answers 200.

    All that it writes is added to `log`.
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
        self._is_condemned = False
        self._was_well = False
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
        self._is_condemned = self._was_well = False

    def is_well(self) -> bool:
        """Whether it answers that it is; one that is stopped or starting does not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", self._health)
            well = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            well = False
        finally:
            connection.close()
        self._was_well |= well
        return well

    def tend(self) -> None:
        """Start it again if it has ended."""
        with self._lock:
            if self._popen is None:
                return
            status = self._popen.poll()
            if status is None:
                if not self._was_well:
                    self.is_well()
                return
            # One that cannot start yet (its port is still taken, Redis is away) is tried again and again.
            if self._was_well and not self._is_condemned:
                self.complaints.append(f"{self.name} ended by itself with status {status}")
            self.start()

    def kill(self, *, whole_group: bool = True) -> None:
        """SIGKILL, to it alone or with all that it started."""
        with self._lock:
            self._is_condemned = True
            if self._popen is not None and self._popen.poll() is None:
                (os.killpg if whole_group else os.kill)(self._popen.pid, signal.SIGKILL)
                self._popen.wait()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def excuse(self) -> None:
        """An end of this one, until it is started again, is nothing to complain of."""
        with self._lock:
            self._is_condemned = True

    def terminate(self, seconds: float, *, times: int = 1) -> None:
        """SIGTERM so many times, and wait for the end; complains of another status than 0 and kills."""
        with self._lock:
            if self._popen is None or self._popen.poll() is not None:
                return
            was_well, self._is_condemned = self._was_well, True
            for _ in range(times):
                self._popen.terminate()
            try:
                status = self._popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.complaints.append(f"{self.name} did not end within {seconds:g} s of SIGTERM")
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()
                return
            if was_well and status != 0:
                self.complaints.append(f"{self.name} ended with status {status} after SIGTERM")

    def retire(self) -> None:
        """It is not started again. What is left of its processes is killed."""
        with self._lock:
            if self._popen is not None:
                self._is_condemned = True
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
