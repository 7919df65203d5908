"""Writes lines to a stream of the process in a thread of its own, so that no caller waits for the reader.

A terminal that is paused, a pipe that nobody reads and a full disk cost lines and nothing else.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

MAX_LINES = 10_000
"""Lines that wait to be written. Beyond it new lines are dropped and counted."""
_RETRY_SECONDS = 0.5


class LineWriter:
    """Thread-safe. The thread starts with the first line, and again in a process that was forked.

    `stream`: its descriptor is written, or the stream if it has none. None discards everything.
    """

    def __init__(self, stream: TextIO | None, max_lines: int = MAX_LINES) -> None:
        self._write = _discard if stream is None else _writer_of(stream)
        self._max_lines = max_lines
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lines: deque[str] = deque()
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Queue a line, without its end. Never blocks and raises nothing."""
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self._num_dropped += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until what was queued is written, at most `seconds`. False: something is not."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._lines or self._is_writing:
                left = deadline - time.monotonic()
                if left <= 0 or self._thread is None:
                    return False
                self._changed.wait(left)
        return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started now; the next line tries again.
            return
        self._thread = thread

    def _run(self) -> None:
        changed = self._changed
        while True:
            with changed:
                while not self._lines:
                    changed.wait()
                lines, self._num_dropped, dropped = list(self._lines), 0, self._num_dropped
                self._lines.clear()
                self._is_writing = True
            if dropped:
                lines.append(f"{dropped} lines are missing here: they came faster than they were read")
            # OSError: the disk is full; there may be space for the next lines. ValueError: a closed stream.
            with suppress(OSError, ValueError):
                self._write_or_stop("".join(f"{line}\n" for line in lines))
            with changed:
                self._is_writing = False
                changed.notify_all()

    def _write_or_stop(self, text: str) -> None:
        try:
            self._write(text)
        except BrokenPipeError:
            # The reader is gone.
            self._write = _discard


def _writer_of(stream: TextIO) -> Callable[[str], None]:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):

        def write(text: str) -> None:
            stream.write(text)
            stream.flush()

        return write
    return lambda text: _write_all(descriptor, text.encode(errors="backslashreplace"))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Another process that shares the descriptor has made it non-blocking.
            time.sleep(_RETRY_SECONDS)


def _discard(_: str) -> None:
    """There is no reader."""
