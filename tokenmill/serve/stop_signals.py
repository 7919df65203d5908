"""Counts requests to stop (SIGINT, SIGTERM, SIGHUP), and waits that they interrupt.

Signal handlers only count: everything else happens in the main loop.
"""

import contextlib
import select
import signal
import socket
from types import FrameType, TracebackType

_STOPS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """Ctrl-C, SIGTERM, or the terminal was closed."""


class StopSignals:
    """A context that counts requests to stop in `count`. SIGCHLD ends a wait too, but is not counted."""

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = socket.socketpair()
        self._previous_handlers: dict[int, object] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> "StopSignals":
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # SIGHUP: the terminal was closed. Under nohup it is ignored, and stays ignored.
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for number in _STOPS if ignored else (*_STOPS, signal.SIGHUP):
            self._previous_handlers[number] = signal.signal(number, self._count)
        self._previous_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _ignore)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal() returned
        signal.set_wakeup_fd(self._previous_wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when a signal arrives."""
        if select.select([self._reader], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)

    def wait_or_stop(self, seconds: float) -> None:
        """Like `wait`. Raises `StopRequested` if a stop was requested before or during the wait."""
        if not self.count:
            self.wait(seconds)
        if self.count:
            raise StopRequested

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler of its own: the default one for SIGCHLD writes nothing to the wakeup descriptor."""
