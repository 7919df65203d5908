"""Stores the content of files, in a directory or in an object store that fsspec knows.

Invariant: a name is visible with its whole content or not at all, whenever the process is killed.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

CHUNK_BYTES = 256 * 1024
_PART = ".part-"
_OWNER_ONLY = 0o700


class UnusableStorage(Exception):
    """The setting names no place that can be used. The message says why."""


class FileStorage:
    """`url`: a directory, or a URL such as `s3://bucket/prefix`. Names are flat. Methods raise `OSError`.

    Raises `UnusableStorage`.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UnusableStorage(f"TOKENMILL_FILES_URL cannot be used: {error}") from error
        self._root = str(root).rstrip("/")
        self.directory = self._root if isinstance(self._fs, LocalFileSystem) else None
        """The directory, unless the files are in an object store."""

    def create(self, name: str) -> "NewFile":
        """A file to be written. It appears when it is committed."""
        if self.directory is None:
            return NewFile(self._fs.open(self._path(name), "wb"), None, "")
        os.makedirs(self.directory, mode=_OWNER_ONLY, exist_ok=True)
        part = self._path(f"{name}{_PART}{secrets.token_hex(4)}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return NewFile(os.fdopen(descriptor, "wb"), part, self._path(name))

    def open(self, name: str) -> IO[bytes]:
        """The content. Raises `FileNotFoundError`."""
        opened: IO[bytes] = self._fs.open(self._path(name), "rb")
        return opened

    def size(self, name: str) -> int:
        """Bytes. Raises `FileNotFoundError`."""
        return int(self._fs.size(self._path(name)))

    def delete(self, name: str) -> None:
        """Without effect if there is no such file."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def older_than(self, seconds: float) -> Iterator[str]:
        """Names of files that were last changed `seconds` ago or earlier, also of those never committed."""
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            for found in self._fs.ls(self._root, detail=True):
                if found["type"] == "file" and time.time() - _changed_at(found) >= seconds:
                    yield str(found["name"]).rpartition("/")[2]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class NewFile:
    """A file that is being written. Also a context manager, which discards it unless it was committed."""

    def __init__(self, file: Any, part: str | None, path: str) -> None:
        self._file = file
        self._part = part
        self._path = path
        self._is_open = True
        self.size = 0

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self.size += len(data)
        return len(data)

    def seek(self, _offset: int, _whence: int = 0) -> int:
        """For werkzeug, which rewinds each part of a form."""
        return 0

    def commit(self) -> None:
        """Make the file visible; it is then on the disk."""
        self._is_open = False
        if self._part is None:
            # An object appears when it is closed.
            self._file.close()
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        os.replace(self._part, self._path)
        directory = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def discard(self) -> None:
        """Without effect on a committed file."""
        if not self._is_open:
            return
        self._is_open = False
        if self._part is None:
            self._file.discard()
            return
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.unlink(self._part)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _changed_at(found: dict[str, Any]) -> float:
    """Seconds since the epoch. The file systems of fsspec name it differently."""
    when = next(found[name] for name in ("mtime", "LastModified", "created", "updated") if name in found)
    return float(when.timestamp() if hasattr(when, "timestamp") else when)
