"""Text input and output of the commands, in any locale and through any pipe.

Invariants: input is UTF-8, or is refused with the position of the first byte that is not. Output that the
locale cannot encode is escaped, so that no text is lost and no command ends with an encoding error.
"""

import io
import json
import os
import sys
from contextlib import suppress
from typing import Any, BinaryIO

import click


class CannotWrite(Exception):
    """Standard output cannot be written, as on a full disk."""


def prepare_standard_streams() -> None:
    """Escape characters that the locale lacks, and open closed standard descriptors on /dev/null."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise the next file or socket takes this number, and a child writes its output into it.
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def decode_text(data: bytes, what: str) -> str:
    """Raises `click.UsageError` with `what` and the position, from 1, of the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{what} is not UTF-8 text (byte {error.start + 1})") from None


def check_argument(argument: str) -> None:
    """Raises `click.UsageError` for an argument that the locale's encoding could not decode."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        data = os.fsencode(argument)
        shown = data.decode("utf-8", "backslashreplace")
        decode_text(data, f"the argument {shown!r}")
        raise click.UsageError(f"the argument {shown!r} is not text in this locale") from None


def read_standard_input() -> str:
    """The whole of standard input. Raises `click.UsageError`."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    try:
        data = sys.stdin.buffer.read()
    except OSError as error:
        raise click.UsageError(f"standard input cannot be read: {error.strerror}") from None
    # Universal newlines, as in Python's text files.
    return io.StringIO(decode_text(data, "standard input"), newline=None).read()


def read_file(file: BinaryIO) -> str:
    """Raises `click.UsageError`."""
    try:
        return decode_text(file.read(), file.name)
    except OSError as error:
        raise click.UsageError(f"{file.name} cannot be read: {error.strerror}") from None


def write_stdout(text: str, *, end: str = "\n") -> None:
    """Raises `CannotWrite`, and `BrokenPipeError` if the reader is gone."""
    try:
        click.echo(text + end, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        # The rest of the buffer would fail again at the exit of the process.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CannotWrite(f"standard output cannot be written: {error.strerror}") from None


def write_stderr(text: str) -> None:
    """Does nothing if standard error cannot be written."""
    with suppress(OSError):
        click.echo(text, err=True)


def to_json(value: Any) -> str:
    """JSON for standard output, with JSON's own escapes where the encoding lacks a character."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=2)
    return text
