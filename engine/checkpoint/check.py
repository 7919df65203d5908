"""Checks the files of the configured model, in milliseconds and without torch."""

from pathlib import Path

from engine.checkpoint.config_file import read_config
from engine.checkpoint.reading import unreadable
from engine.checkpoint.source import find_directory
from engine.checkpoint.tokenizer_files import check_settings_files, check_tokenizer_files
from engine.checkpoint.weights import check_weights


def check_source(source: str) -> None:
    """Check a local model directory. A hub id passes, since its files may not be downloaded yet.

    Raises `InvalidParameter` or `UnsupportedModel` with the file and the reason in one line.
    """
    directory = find_directory(source)
    if directory is not None:
        check_directory(directory)


def check_directory(directory: Path) -> None:
    """Check all files of a model directory. Raises as `check_source` does."""
    try:
        # `glob` finds nothing in a directory without read permission, and raises nothing.
        next(directory.iterdir(), None)
    except OSError as error:
        raise unreadable(directory, error) from error
    config = read_config(directory)
    check_settings_files(directory)
    check_weights(directory, config)
    check_tokenizer_files(directory)
