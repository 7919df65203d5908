"""Checks for a directory for temporary files, which libraries need without checking themselves."""

import tempfile


class NoTemporaryDirectory(Exception):
    """The message has the directories that were tried, and the variable to set."""


def check_temporary_directory() -> None:
    """Raises `NoTemporaryDirectory`."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise NoTemporaryDirectory(f"{error.strerror}; set TMPDIR to a writable directory") from None
