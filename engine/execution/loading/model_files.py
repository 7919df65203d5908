"""Finds a model's files and tells one model from another. Does not load anything.

Law: the same files give the same fingerprint, wherever they lie; other weights, another tokenizer or another
template give another one, so that a request is not continued by a model that did not begin it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from engine.checkpoint.reading import unreadable
from engine.checkpoint.source import find_directory
from engine.errors import InvalidParameter
from engine.execution.machine.library_messages import one_line

TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHT_FILES = ("*.safetensors", "*.bin")
# Copies of the weights in formats of other programs.
IGNORED_FILES = ["original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*"]
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


def find_model(source: str, progress: Callable[[str], None]) -> Path:
    """The directory of a model: `source` itself, or the local copy of a hub id, downloaded if need be.

    Raises `InvalidParameter` when there is no such model.
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
        # The hub client has errors of its own, and others for caches that it cannot find or write.
        raise InvalidParameter(
            "model", f"{source!r} is neither a directory nor a hub id that can be had: {one_line(error)}"
        ) from error
    raise InvalidParameter("model", f"{source!r} holds no weights ({', '.join(WEIGHT_FILES)})")


def fingerprint(directory: Path) -> str:
    """32 hex digits that stand for the model in `directory`.

    Small files count whole; of weights count name, size and samples spread over each file, which take no time
    and differ between any two trained models.
    """
    digest = hashlib.sha256()
    files = {path for pattern in (*TEXT_FILES, *WEIGHT_FILES) for path in directory.glob(pattern)}
    for path in sorted(file for file in files if file.is_file()):
        try:
            _add_file(digest, path)
        except OSError as error:
            raise unreadable(path, error) from error
    return digest.hexdigest()[:32]


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        digest.update(path.read_bytes())
    elif path.suffix in (".safetensors", ".bin"):
        _add_samples(digest, path, size)
    else:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())


def _add_samples(digest: "hashlib._Hash", path: Path, size: int) -> None:
    with path.open("rb") as file:
        for sample in range(NUM_SAMPLES):
            file.seek(sample * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
