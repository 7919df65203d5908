"""Text that comes into the command line and goes out of it, in any locale and through any pipe.

Invariants: what comes in is UTF-8 or refused with the place of the first byte that is not; what goes out and
cannot be encoded is escaped, so that no text is lost and no command ends by an encoding error.
"""

import io
import json
import os
import sys
from contextlib import suppress
from typing import Any, BinaryIO

import click


class CannotWrite(Exception):
    """Standard output takes no text, as on a full disk."""


def prepare_standard_streams() -> None:
    """Escape what the locale's encoding lacks; give closed descriptors to nobody else."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise the next file or socket gets this number, and a child writes its output into it.
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def decode_text(data: bytes, what: str) -> str:
    """Raises `click.UsageError`, which names `what` and the first byte that is not UTF-8, counted from 1."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{what} is not UTF-8 text (byte {error.start + 1})") from None


def check_argument(argument: str) -> None:
    """Raises `click.UsageError` for an argument with bytes that the locale's encoding does not have."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        data = os.fsencode(argument)
        shown = data.decode("utf-8", "backslashreplace")
        decode_text(data, f"the argument {shown!r}")
        raise click.UsageError(f"the argument {shown!r} is not text in this locale") from None


def read_standard_input() -> str:
    """All of it. Raises `click.UsageError`."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    try:
        data = sys.stdin.buffer.read()
    except OSError as error:
        raise click.UsageError(f"standard input cannot be read: {error.strerror}") from None
    # Line ends as Python's text files have them.
    return io.StringIO(decode_text(data, "standard input"), newline=None).read()


def read_file(file: BinaryIO) -> str:
    """Raises `click.UsageError`."""
    try:
        return decode_text(file.read(), file.name)
    except OSError as error:
        raise click.UsageError(f"{file.name} cannot be read: {error.strerror}") from None


def show(text: str, *, end: str = "\n") -> None:
    """Write to standard output. Raises `CannotWrite`, and `BrokenPipeError` when its reader has gone."""
    try:
        click.echo(text + end, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still in its buffer would fail once more at the end of the process.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CannotWrite(f"standard output cannot be written: {error.strerror}") from None


def note(text: str) -> None:
    """Write to standard error, where that is possible."""
    with suppress(OSError):
        click.echo(text, err=True)


def to_json(value: Any) -> str:
    """JSON for standard output: its own escapes where the encoding lacks a character."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=2)
    return text
