"""A cache directory that cannot be written is a wrong setting. Knows not what is kept there."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.settings.errors import SettingError

_UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}
)


@contextmanager
def usable_cache(directory: str) -> Iterator[None]:
    """A context for what writes into `directory`. Raises `SettingError` where that is impossible."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE or not _is_below(error.filename, directory):
            raise
        raise SettingError(
            f"the cache directory {directory} cannot be written: {error.strerror}: {error.filename}; choose"
            " another with TOKENMILL_CACHE_DIR"
        ) from error


def _is_below(name: object, directory: str) -> bool:
    """Or above it: of a directory that is missing, the first parent that exists is what cannot be written."""
    if not isinstance(name, str | bytes):
        return False
    path, place = (Path(os.path.abspath(os.fsdecode(each))) for each in (name, directory))
    return path.is_relative_to(place) or place.is_relative_to(path)
