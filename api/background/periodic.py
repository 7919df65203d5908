"""Runs a function again and again in a daemon thread."""

import threading
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""Pause after an exception."""


def start_periodic(name: str, run: Callable[[], float]) -> threading.Thread:
    """Start a thread that calls `run` until the process ends.

    `run` returns the seconds until its next call. An exception is logged and does not end the thread.
    """

    def run_forever() -> None:
        pause = threading.Event()
        while True:
            try:
                seconds = run()
            except Exception:  # noqa: BLE001 - it is logged
                _log.exception("a background job failed; it will run again", job=name)
                seconds = RETRY_SECONDS
            pause.wait(seconds)

    thread = threading.Thread(target=run_forever, name=name, daemon=True)
    thread.start()
    return thread
