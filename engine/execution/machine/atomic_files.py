"""Files and directories in the cache that other processes read: there as a whole, or not there.

Law: what takes a name was written to the end. What a killed process leaves is under another name, at
which nobody looks. Knows no contents.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` when the block ends without an exception.

    Raises `OSError` where that cannot be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        yield unfinished
        os.replace(unfinished, path)
