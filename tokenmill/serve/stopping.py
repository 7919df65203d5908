"""Stops children that belong together, and says what it waits for. Knows no room by name.

Law: it ends. A first request asks, a second hurries, a third or too long a wait kills. Each is safe: what a
worker has not finished goes on at the next start.
"""

import signal
import time
from collections.abc import Callable, Sequence

from tokenmill.serve.processes import Child
from tokenmill.serve.signals import StopSignals
from tokenmill.serve.state import SELF

_POLL_SECONDS = 0.2
#: Two signals sent at once would arrive as one.
_SIGNAL_GAP_SECONDS = 0.2
_FIRST_NOTICE_SECONDS = 1.0
_NOTICE_SECONDS = 10.0


class _Stopping:
    """One child on its way to its end."""

    def __init__(self, child: Child, signals: StopSignals, print_line: Callable[[str, str], None]) -> None:
        self._child = child
        self._signals = signals
        self._print = print_line
        self._began = time.monotonic()
        self._deadline = self._began + child.spec.stop_seconds
        self._next_notice = self._began + _FIRST_NOTICE_SECONDS
        self._num_sent = 0
        self._next_signal = self._began

    @property
    def has_ended(self) -> bool:
        return self._child.returncode is not None

    def turn(self) -> None:
        """SIGTERM, once more at a second request to stop; SIGKILL at the third, or when it takes too long."""
        if self.has_ended:
            return
        spec, now = self._child.spec, time.monotonic()
        if now > self._deadline or self._signals.count > 2:
            self._print(SELF, f"the {spec.name} does not stop; killing it")
            self._child.kill()
        elif spec.kill_hurried and self._signals.count > 1:
            self._child.kill()
        elif self._num_sent < max(1, self._signals.count):
            if now >= self._next_signal:
                self._child.signal(signal.SIGTERM)
                self._num_sent += 1
                self._next_signal = now + _SIGNAL_GAP_SECONDS
        elif now >= self._next_notice:
            self._next_notice = now + _NOTICE_SECONDS
            self._print(SELF, self._notice(self._deadline - now))

    def _notice(self, seconds: float) -> str:
        waiting = f"waiting for the {self._child.spec.name}, which {self._child.spec.stopping}"
        what = "once more kills it" if self._num_sent > 1 else "again ends it at once"
        return f"{waiting} (at most {seconds:.0f} s); Ctrl-C {what}, and nothing is lost"


def stop_together(
    children: Sequence[Child], signals: StopSignals, print_line: Callable[[str, str], None]
) -> None:
    """Return when all have ended."""
    stopping = [_Stopping(child, signals, print_line) for child in children]
    while True:
        for each in stopping:
            each.turn()
        if all(each.has_ended for each in stopping):
            break
        signals.wait(_POLL_SECONDS)
    for child in children:
        child.finish_output()
        print_line(SELF, f"{child.spec.name} {how_it_ended(child.returncode)}")


def how_it_ended(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return "has stopped" if returncode == 0 else f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"
