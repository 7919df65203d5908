"""What the command line prints: lines of several processes side by side, and tasks for people to read.

Law: results go to standard output, everything else to standard error; colour is only ever an addition.
"""

import errno
import os
import sys
import threading
from collections.abc import Mapping

import click

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
_COLOURS = {"redis": "magenta", "worker": "cyan", "api": "blue", "serve": "green"}


def colour_wanted(environ: Mapping[str, str] = os.environ) -> bool | None:
    """False if NO_COLOR is set to anything (no-color.org); None lets the terminal decide."""
    return False if environ.get("NO_COLOR") else None


class LinePrinter:
    """Prints whole lines of several processes, each with its name. May be called from any thread."""

    def __init__(self, colour: bool | None) -> None:
        self._colour = colour
        self._lock = threading.Lock()

    def __call__(self, name: str, text: str) -> None:
        """`name` "" prints `text` alone."""
        prefix = click.style(f"{name:<6} | ", fg=_COLOURS.get(name.partition("-")[0])) if name else ""
        with self._lock:
            try:
                click.echo(prefix + text, color=self._colour)
            except OSError as error:
                if error.errno in _PASSING:
                    # This line is lost; the next may find room.
                    return
                # Nobody reads any more; the processes must go on writing, so their pipes are still emptied.
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
