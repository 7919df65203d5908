"""Requests to stop, as a process receives them, and waiting that they interrupt.

Law: a request is counted, never acted upon inside the handler. Knows nothing of what is stopped.
"""

import contextlib
import select
import signal
import socket
from types import FrameType, TracebackType

_STOPS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """Ctrl-C, SIGTERM or a closed terminal."""


class StopSignals:
    """While entered, counts requests to stop in `count`; the end of a child ends a wait too."""

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = socket.socketpair()
        self._before: dict[int, object] = {}
        self._wakeup_before = -1

    def __enter__(self) -> "StopSignals":
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # SIGHUP: the terminal was closed. Under nohup it is ignored, and stays so.
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for number in _STOPS if ignored else (*_STOPS, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._count)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _ignore)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal() returned
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when a signal has come."""
        if select.select([self._reader], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)

    def pause(self, seconds: float) -> None:
        """`wait`, but raises `StopRequested` if a stop has been asked for, before it or within it."""
        if not self.count:
            self.wait(seconds)
        if self.count:
            raise StopRequested

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler, as the default for SIGCHLD would not wake anybody."""
