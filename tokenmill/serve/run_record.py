"""What other commands can read of a run: addresses and processes, in files of the state directory.

Law: a write that fails, as on a full disk, never ends the run. It is reported once and repeated.
"""

from collections.abc import Callable, Mapping
from functools import partial

from tokenmill.serve.processes import ProcessId
from tokenmill.serve.state import SELF, StateDirectory


class RunRecord:
    """The files of one run. `print_line(name, text)` shows what cannot be written."""

    def __init__(self, state: StateDirectory, print_line: Callable[[str, str], None]) -> None:
        self._state = state
        self._print = print_line
        self._unwritten: dict[str, Callable[[], None]] = {}
        self._is_reported = False

    @property
    def is_written(self) -> bool:
        return not self._unwritten

    def put_address(self, name: str, address: str) -> None:
        """`name`: `redis-url` or `api-url`."""
        self._unwritten[name] = partial(self._state.write_address, name, address)
        self.retry()

    def put_processes(self, processes: Mapping[str, ProcessId]) -> None:
        """In the order in which they are to be stopped."""
        self._unwritten["processes"] = partial(self._state.write_processes, dict(processes))
        self.retry()

    def retry(self) -> None:
        """Write again what could not be written."""
        try:
            for name, write in list(self._unwritten.items()):
                write()
                del self._unwritten[name]
        except OSError as error:
            if not self._is_reported:
                reason = f"{self._state.path} cannot be written: {error.strerror}"
                self._print(SELF, f"{reason}; the service runs on, and the write is tried again")
            self._is_reported = True
        else:
            self._is_reported = False
