"""Programs for child processes, and the lines that they print."""

import threading

TIMEOUT_SECONDS = 240.0
SLEEPER = "import time; print('up', flush=True); time.sleep(300)"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
EXITS_ON_SIGTERM = """
import signal, sys, time
def stop(*_):
    print('bye', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('up', flush=True)
time.sleep(300)
"""
EXITS_ON_SECOND_SIGTERM = """
import signal, sys, time
count = 0
def stop(*_):
    global count
    count += 1
    print('asked', count, flush=True)
    if count == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('up', flush=True)
while True:
    time.sleep(300)
"""
# With a fatal exit code.
EXITS_ON_SIGUSR1 = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: exit(78))
print('up', flush=True)
signal.pause()
"""
# Like the master process of a server: what it forks survives it.
FORKING = """
import os, time
if not os.fork():
    print('forked', os.getpid(), flush=True)
time.sleep(300)
"""


class Lines:
    """Records the lines of children, by name, and waits for them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def __call__(self, name: str, text: str) -> None:
        with self._changed:
            self.seen.append((name, text))
            self._changed.notify_all()

    def of(self, name: str) -> list[str]:
        return [text for each, text in self.seen if each == name]

    def count(self, text: str) -> int:
        return sum(text in line for _, line in self.seen)

    def wait_for(self, text: str, times: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(text) >= times, TIMEOUT_SECONDS), "\n".join(
                line for _, line in self.seen
            )
