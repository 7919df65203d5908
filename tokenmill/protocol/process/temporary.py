"""A directory for temporary files, which libraries of every room need without saying so when they start."""

import tempfile


class NoTemporaryDirectory(Exception):
    """The message says which were tried, and what to set."""


def check_temporary_directory() -> None:
    """Raises `NoTemporaryDirectory`."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise NoTemporaryDirectory(
            f"{error.strerror}; set TMPDIR to a directory that can be written"
        ) from None
