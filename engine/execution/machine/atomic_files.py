"""Replaces files in the cache atomically: readers see the old file or the complete new one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A temporary path, which replaces `path` when the block ends without an exception.

    Creates missing directories. Raises `OSError` if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        yield unfinished
        os.replace(unfinished, path)
