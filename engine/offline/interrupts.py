"""Delays Ctrl-C until a point where the program can stop safely."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupt() -> Iterator[Callable[[], None]]:
    """Yields a function that raises `KeyboardInterrupt` if SIGINT was received since.

    A second SIGINT raises at once. Outside of the main thread, nothing is delayed.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield lambda: None
        return
    is_interrupted = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    def raise_interrupt() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield raise_interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
