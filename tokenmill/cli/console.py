"""What the commands print on: terminals, and the output of several processes with a name on each line."""

import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

import click
from rich.console import Console

from tokenmill.process.line_writer import LineWriter

_FLUSH_SECONDS = 2.0
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
    """Prints whole lines, in a thread of its own: no caller waits for whoever reads them.

    `as_json`: each line is a JSON object with the name of its process; text becomes its `event`.
    """

    def __init__(self, colour: bool | None, *, as_json: bool = False) -> None:
        stream = sys.stdout
        self._colour = colour is not False and stream is not None and stream.isatty()
        self._as_json = as_json
        self._writer = LineWriter(stream)

    def __call__(self, name: str, text: str) -> None:
        """Print a line of the process `name`; "" prints `text` alone."""
        self._writer.write(_to_json(name, text) if self._as_json else self._prefix(name) + text)

    def flush(self) -> None:
        """Wait a moment for the last lines."""
        self._writer.flush(_FLUSH_SECONDS)

    def _prefix(self, name: str) -> str:
        prefix = f"{name:<6} | " if name else ""
        return click.style(prefix, fg=_COLOURS.get(name.partition("-")[0])) if self._colour else prefix


def _to_json(name: str, text: str) -> str:
    process = name or "serve"
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        event = {"event": text, "level": "info", "timestamp": datetime.now(UTC).isoformat()}
    return json.dumps({**event, "process": process}, ensure_ascii=False)
