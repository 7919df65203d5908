"""SIGTERM and SIGINT while a process starts.

Invariant: after `exit_on_signals` a stop signal ends the process at once, until the process installs its own
handlers. As process 1, as in a container without an init process, this needs handlers: the kernel ignores
signals of process 1 without one (sglang#16145). Other processes are ended by the kernel.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)


def exit_on_signals() -> None:
    """Call this before anything that takes time. Main thread only."""
    if os.getpid() == 1:
        _start_watching()
    for number in STOPS:
        signal.signal(number, _exit if os.getpid() == 1 else signal.SIG_DFL)
    # They may be blocked by `blocked_signals` of the program that executed this one.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block stop signals while this process executes another program, which calls `exit_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _start_watching() -> None:
    """Python runs handlers between bytecode instructions only; a model may load within one for a minute."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="startup-signals").start()


def _watch(reader: socket.socket) -> None:
    while received := reader.recv(1):
        if signal.getsignal(received[0]) is _exit:
            _exit(received[0], None)


def _exit(number: int, _frame: FrameType | None) -> None:
    # Without cleanup: running native code could block it, and there is nothing to clean up yet.
    os._exit(128 + number)
