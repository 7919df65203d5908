"""Stops child processes together and reports what it waits for.

The first request to stop sends SIGTERM, the second sends it again, and the third, or an expired deadline,
sends SIGKILL. Each is safe: tasks that a worker has not finished resume at the next start.
"""

import signal
import time
from collections.abc import Callable, Sequence

from tokenmill.serve.child_processes import Child
from tokenmill.serve.state_directory import SELF
from tokenmill.serve.stop_signals import StopSignals

_POLL_SECONDS = 0.2
#: Two signals sent at once would arrive as one.
_SIGNAL_GAP_SECONDS = 0.2
_FIRST_NOTICE_SECONDS = 1.0
_NOTICE_SECONDS = 10.0


class _StoppingChild:
    def __init__(self, child: Child, signals: StopSignals, print_line: Callable[[str, str], None]) -> None:
        self._child = child
        self._signals = signals
        self._print = print_line
        began = time.monotonic()
        self._deadline = began + child.spec.stop_seconds
        self._next_notice = began + _FIRST_NOTICE_SECONDS
        self._num_sent = 0
        self._next_signal = began

    @property
    def has_exited(self) -> bool:
        return self._child.returncode is not None

    def poll(self) -> None:
        """Send the signal that is due, or report what is waited for."""
        if self.has_exited:
            return
        spec, now = self._child.spec, time.monotonic()
        if now > self._deadline or self._signals.count > 2:
            self._print(SELF, f"the {spec.name} does not stop; killing it")
            self._child.kill()
        elif spec.kill_on_second_request and self._signals.count > 1:
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
        waiting = f"waiting for the {self._child.spec.name}, which {self._child.spec.while_stopping}"
        what = "once more kills it" if self._num_sent > 1 else "again ends it at once"
        return f"{waiting} (at most {seconds:.0f} s); Ctrl-C {what}, and nothing is lost"


def stop_together(
    children: Sequence[Child], signals: StopSignals, print_line: Callable[[str, str], None]
) -> None:
    """Return when all have exited."""
    stopping = [_StoppingChild(child, signals, print_line) for child in children]
    while True:
        for each in stopping:
            each.poll()
        if all(each.has_exited for each in stopping):
            break
        signals.wait(_POLL_SECONDS)
    for child in children:
        child.finish_output()
        print_line(SELF, f"{child.spec.name} {describe_exit(child.returncode)}")


def describe_exit(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return "has stopped" if returncode == 0 else f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"
