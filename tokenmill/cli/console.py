"""What the commands print on: terminals, and the output of several processes with a name on each line."""

import errno
import os
import sys
import threading
from collections.abc import Mapping

import click
from rich.console import Console

_TRANSIENT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
_PIPE_WIDTH = 200
_COLOURS = {"redis": "magenta", "worker": "cyan", "api": "blue", "serve": "green"}


def use_colour(environ: Mapping[str, str] = os.environ) -> bool | None:
    """False if NO_COLOR is set (no-color.org); None lets the terminal decide."""
    return False if environ.get("NO_COLOR") else None


def terminal(*, stderr: bool = False) -> Console:
    """For tables and progress. Without a terminal it prints plain text."""
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return Console(
        stderr=stderr,
        markup=False,
        highlight=False,
        width=None if is_terminal else _PIPE_WIDTH,
    )


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
