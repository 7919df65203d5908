"""Prints the output of several processes, each line with the name of its process."""

import errno
import os
import sys
import threading
from collections.abc import Mapping

import click

_TRANSIENT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
_COLOURS = {"redis": "magenta", "worker": "cyan", "api": "blue", "serve": "green"}


def use_colour(environ: Mapping[str, str] = os.environ) -> bool | None:
    """False if NO_COLOR is set (no-color.org); None lets the terminal decide."""
    return False if environ.get("NO_COLOR") else None


class LinePrinter:
    """Prints whole lines. Thread-safe."""

    def __init__(self, colour: bool | None) -> None:
        self._colour = colour
        self._lock = threading.Lock()

    def __call__(self, name: str, text: str) -> None:
        """Print a line of the process `name`; "" prints `text` alone."""
        prefix = click.style(f"{name:<6} | ", fg=_COLOURS.get(name.partition("-")[0])) if name else ""
        with self._lock:
            try:
                click.echo(prefix + text, color=self._colour)
            except OSError as error:
                if error.errno in _TRANSIENT_ERRORS:
                    # This line is lost; there may be space for the next.
                    return
                # The reader is gone. Keep draining the pipes of the processes, so that they do not block.
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
