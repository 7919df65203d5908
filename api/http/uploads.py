"""Keeps the bodies of file uploads on disk while they arrive: they are too large for memory."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

from waitress.buffers import OverflowableBuffer, TempfileBasedBuffer

from api.problems import Problem

MEMORY_BYTES = 256 * 1024
"""A smaller body stays in memory."""
_FORM_BYTES = 64 * 1024
"""What a form may have beside its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """`max_file_bytes`: limit of a file. `directory`: where bodies are kept; None: that of temporary files.

    `check`: called with the headers of an upload (names as in WSGI, without `HTTP_`); raises `Problem`.
    """

    max_file_bytes: int
    directory: str | None
    check: Callable[[Mapping[str, str]], None]

    @property
    def refused_from(self) -> int:
        """The smallest size of a body that is refused."""
        return self.max_file_bytes + _FORM_BYTES + 1

    def new_buffer(self) -> "UploadBuffer":
        return UploadBuffer(self.directory)


def is_upload(command: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request is a form for `/v1/files`, however its client writes the path."""
    media_type = headers.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    return command == "POST" and path.rstrip("/").endswith("/files") and media_type == "multipart/form-data"


class UploadBuffer(OverflowableBuffer):  # type: ignore[misc]  # Waitress ships no types
    """A buffer whose file has no name, so that nothing of it remains when the process ends."""

    def __init__(self, directory: str | None) -> None:
        super().__init__(MEMORY_BYTES)
        # Waitress creates it when it is needed.
        self.buf: Any = None
        self._directory = directory

    @property
    def memory_bytes(self) -> int:
        return 0 if self.overflowed else len(self)

    def _set_large_buffer(self) -> None:
        if self._directory is not None:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        small, self.buf = self.buf, _FileBuffer(self._directory, self.buf)
        if small is not None:
            small.close()
        self.overflowed = True


class _FileBuffer(TempfileBasedBuffer):  # type: ignore[misc]  # Waitress ships no types
    def __init__(self, directory: str | None, small: Any) -> None:
        self._directory = directory
        super().__init__(small)

    def newfile(self) -> IO[bytes]:
        return TemporaryFile("w+b", dir=self._directory)


def storage_full(error: OSError) -> Problem:
    """The reply to an upload that cannot be kept."""
    return Problem(507, "storage_unavailable", f"the upload cannot be stored: {error.strerror or error}")
