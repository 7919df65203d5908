"""Reads files of a model directory. Errors name the path and the reason."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import InvalidParameter

LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
MAX_NAMES = 3
"""Names listed in a message; the others are counted."""


def unusable(path: Path, reason: str) -> InvalidParameter:
    """The error for an invalid file of the model."""
    return InvalidParameter("model", f"{path}: {reason}")


def unreadable(path: Path, error: OSError) -> InvalidParameter:
    """The error for a file that this process cannot read."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return unusable(path, f"is a link to {os.readlink(path)}, which does not exist")
    reason = f"cannot be read: {error.strerror or error}"
    if isinstance(error, PermissionError):
        reason += _ownership(path)
    return unusable(path, reason)


def _ownership(path: Path) -> str:
    """Mode and owner of `path`, or of its nearest parent that can be examined."""
    for ancestor in (path, *path.absolute().parents):
        try:
            status = ancestor.stat()
        except OSError:
            continue
        named = "" if ancestor == path else f" of {ancestor}"
        mode = stat.S_IMODE(status.st_mode)
        return f" (mode{named} {mode:04o}, owner uid {status.st_uid}; this process has uid {os.geteuid()})"
    return f" (this process has uid {os.geteuid()})"


def open_checked(path: Path) -> BinaryIO:
    """Open a file. Raises `InvalidParameter` if it is empty or, for instance, a Git LFS pointer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise unusable(path, "is not a file")
        file = path.open("rb")
        head = file.read(1024)
        file.seek(0)
    except OSError as error:
        raise unreadable(path, error) from error
    if reason := _substitute(head):
        file.close()
        raise unusable(path, reason)
    return file


def _substitute(head: bytes) -> str | None:
    """What a file that begins with `head` is instead of the real one; None if it is the real one."""
    if not head:
        return "is empty (0 bytes)"
    if head.startswith(LFS_PREFIX):
        lines = dict(line.partition(" ")[::2] for line in head.decode("utf-8", "replace").splitlines())
        size = f" of {lines['size']} bytes" if "size" in lines else ""
        return f"is a Git LFS pointer, not the file{size}; fetch it with `git lfs pull`"
    if head.lstrip()[:9].lower() in (b"<!doctype", b"<html>"):
        return "is an HTML page, not the file; download it again"
    return None


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The object in a JSON file. Raises `InvalidParameter`; with `unique_keys` also for a repeated key."""
    with open_checked(path) as file:
        try:
            return parse_object(file.read(), unique_keys=unique_keys)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise unusable(path, str(error)) from error


def parse_object(text: bytes, *, unique_keys: bool) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` with the reason; with `unique_keys` also for a repeated key."""
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is not usable JSON: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"must hold a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {twice!r} twice")
    return found


def listed(names: list[str]) -> str:
    """Names in a message: the first few, and the number of the others."""
    shown = ", ".join(names[:MAX_NAMES])
    more = len(names) - MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
