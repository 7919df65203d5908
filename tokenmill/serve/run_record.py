"""Records a run for other commands: its addresses and processes, in files of the state directory.

A write that fails, as on a full disk, does not end the run. It is reported once and repeated.
"""

from collections.abc import Callable, Mapping
from functools import partial

from tokenmill.serve.child_processes import ProcessId
from tokenmill.serve.state_directory import SELF, StateDirectory


class RunRecord:
    """The files of one run. `print_line(name, text)` reports a failed write."""

    def __init__(self, state: StateDirectory, print_line: Callable[[str, str], None]) -> None:
        self._state = state
        self._print = print_line
        self._pending: dict[str, Callable[[], None]] = {}
        self._is_reported = False

    @property
    def is_written(self) -> bool:
        return not self._pending

    def set_address(self, name: str, address: str) -> None:
        """`name`: `redis-url` or `api-url`."""
        self._pending[name] = partial(self._state.write_address, name, address)
        self.write_pending()

    def set_processes(self, processes: Mapping[str, ProcessId]) -> None:
        """In the order in which they are stopped."""
        self._pending["processes"] = partial(self._state.write_processes, dict(processes))
        self.write_pending()

    def write_pending(self) -> None:
        """Repeat the writes that failed."""
        try:
            for name, write in list(self._pending.items()):
                write()
                del self._pending[name]
        except OSError as error:
            if not self._is_reported:
                reason = f"{self._state.path} cannot be written: {error.strerror}"
                self._print(SELF, f"{reason}; the service continues, and the write is repeated")
            self._is_reported = True
        else:
            self._is_reported = False
