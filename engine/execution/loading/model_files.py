"""Finds the directory of a model: a local one, or the local copy of a model on the hub."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from engine.checkpoint.fingerprint import TEXT_FILES, WEIGHT_FILES
from engine.checkpoint.source import find_directory
from engine.errors import InvalidParameter
from engine.execution.machine.library_messages import one_line

# Copies of the weights in formats of other programs.
IGNORED_FILES = ["original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*"]


def find_model(source: str, progress: Callable[[str], None]) -> Path:
    """The directory `source`, or the local copy of the hub id `source`, which is downloaded if missing.

    Raises `InvalidParameter` if there is no such model.
    """
    directory = find_directory(source)
    if directory is not None:
        return directory
    progress(f"looking for {source} on the hub and in its cache")
    try:
        for weights in WEIGHT_FILES:
            found = Path(
                snapshot_download(
                    source, allow_patterns=[*TEXT_FILES, weights], ignore_patterns=IGNORED_FILES
                )
            )
            if any(found.glob(weights)):
                return found
    except Exception as error:
        # The hub client has its own errors, and others for caches that it cannot find or write.
        raise InvalidParameter(
            "model",
            f"{source!r} is neither a directory nor an available hub id: {one_line(error)}",
        ) from error
    raise InvalidParameter("model", f"{source!r} holds no weights ({', '.join(WEIGHT_FILES)})")
