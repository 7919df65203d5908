"""Silences transformers while it loads, and shortens other libraries' error messages."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR

from transformers.utils import logging

MAX_CHARS = 300


def one_line(error: BaseException) -> str:
    """The message of `error` without line breaks, cut after `MAX_CHARS`; its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Log errors only, without progress bars and Python warnings. Restores the settings. For one thread."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
