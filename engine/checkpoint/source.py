"""Decides whether the setting `model` is a local directory or an id on the model hub."""

import re
from pathlib import Path

from engine.checkpoint.reading import unreadable
from engine.errors import InvalidParameter

_HUB_ID = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


def find_directory(source: str) -> Path | None:
    """The local directory `source`; None if `source` is a hub id.

    An existing directory takes precedence over a hub id of the same name. `./x`, `../x`, `/x`, `~/x` and
    `x/y/z` are never hub ids. Raises `InvalidParameter`.
    """
    if not source.strip():
        raise InvalidParameter("model", "must name a directory or a hub id such as owner/name")
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise InvalidParameter(
            "model", f"{source!r}: this home directory is unknown (no HOME, or no such user)"
        ) from error
    try:
        # Not `is_dir`, which returns False for some errors.
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        if _HUB_ID.fullmatch(source):
            return None
        raise InvalidParameter("model", _missing(source, path)) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not path.is_dir():
        raise InvalidParameter("model", _not_a_directory(path))
    return path


def _missing(source: str, path: Path) -> str:
    if path.is_symlink():
        return f"{source!r} is a link to {path.readlink()}, which does not exist"
    tried = "" if path.is_absolute() else f" (tried {path.absolute()})"
    return f"{source!r} is neither an existing directory{tried} nor a hub id such as owner/name"


def _not_a_directory(path: Path) -> str:
    if path.suffix == ".gguf":
        return (
            f"{path} is a GGUF file, which is not served; use the model's directory in transformers' format"
        )
    return f"{path} is a file; the setting takes the directory that holds config.json, weights and tokenizer"
