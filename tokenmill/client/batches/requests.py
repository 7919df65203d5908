"""The calls of the HTTP API that concern files and batches, and the lines of a batch's input."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, cast
from urllib.parse import quote

from tokenmill.client.steps import Request, Upload

Lines = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""The path of a file of JSON lines, or the lines: whole ones, or the bodies of the calls alone."""

FILES = "/v1/files"
BATCHES = "/v1/batches"
MAX_PAGE = 100
UPLOAD_SECONDS = 600.0
"""How long the service may read a large file after it has received it."""


def file_path(file_id: str) -> str:
    return f"{FILES}/{_checked(file_id)}"


def batch_path(batch_id: str) -> str:
    return f"{BATCHES}/{_checked(batch_id)}"


def _checked(name: str) -> str:
    """Raises ValueError for an id that would be another path."""
    if not name or name in (".", ".."):
        raise ValueError(f"{name!r} is not an id")
    return quote(name, safe="")


def upload_of_path(path: str | os.PathLike[str], purpose: str) -> Request:
    """Raises OSError when it is sent, if the file cannot be read."""
    return _upload(
        Upload(name=Path(path).name, open=lambda: Path(path).open("rb"), fields={"purpose": purpose})
    )


def upload_of_file(file: IO[bytes], name: str, purpose: str) -> Request:
    """`file` stays open. httpx sends it from its start at each attempt."""
    return _upload(
        Upload(name=name, open=lambda: open(os.dup(file.fileno()), "rb"), fields={"purpose": purpose})
    )


def _upload(upload: Upload) -> Request:
    # A second upload would be a second file.
    return Request(method="POST", path=FILES, upload=upload, timeout=UPLOAD_SECONDS, repeatable=False)


def write_lines(lines: Iterable[Mapping[str, Any]], endpoint: str) -> IO[bytes]:
    """A temporary file with the lines. A body alone gets its number, from 0, as `custom_id`."""
    file = cast("IO[bytes]", TemporaryFile())  # noqa: SIM115 - the caller closes it
    for number, line in enumerate(lines):
        whole = line
        if "custom_id" not in line:
            whole = {"custom_id": str(number), "method": "POST", "url": endpoint, "body": line}
        file.write(json.dumps(whole, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    file.flush()
    return file


def batch_creation(file_id: str, endpoint: str, window: str, metadata: Mapping[str, str] | None) -> Request:
    body: dict[str, Any] = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    if metadata is not None:
        body["metadata"] = dict(metadata)
    # A second creation would be a second batch.
    return Request(method="POST", path=BATCHES, json=body, repeatable=False)


def page(path: str, cursor: str | None, params: Mapping[str, str]) -> Request:
    where = {} if cursor is None else {"after": cursor}
    return Request(method="GET", path=path, params={"limit": str(MAX_PAGE), **params, **where})
