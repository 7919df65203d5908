"""SIGTERM and SIGINT while a process starts. In this room because it is the one that every process imports.

Invariant: from `end_on_signals` on, a request to stop ends the process at once, until the process installs
handlers of its own. The kernel drops signals of process 1 for which it has no handler, as in a container
without an init process (sglang#16145); every other process is ended by the kernel itself.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)


def end_on_signals() -> None:
    """Call it before everything that takes time. For the main thread only."""
    if os.getpid() == 1:
        _watch()
    for number in STOPS:
        signal.signal(number, _end if os.getpid() == 1 else signal.SIG_DFL)
    # They were held back while this program replaced another in the same process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextmanager
def held_signals() -> Iterator[None]:
    """A context for executing another program in this process: requests to stop wait for `end_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _watch() -> None:
    """Python runs a handler between two of its own instructions; a model may load in one for a minute."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_end_when_asked, args=(reader,), daemon=True, name="startup-signals").start()


def _end_when_asked(reader: socket.socket) -> None:
    while received := reader.recv(1):
        if signal.getsignal(received[0]) is _end:
            _end(received[0], None)


def _end(number: int, _frame: FrameType | None) -> None:
    # No cleaning up: native code that is under way could wait for ever, and nothing is held yet.
    os._exit(128 + number)
