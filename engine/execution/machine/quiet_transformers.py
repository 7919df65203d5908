"""Keeps transformers' own warnings and progress bars out of the way; what matters is told by our messages."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only, no bars, no Python warnings; all is as it was afterwards. For one thread, at start-up."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers types it not
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers types it not
