"""Identifies a model by its files, so that a worker resumes only requests that the same model started.

Other weights, another tokenizer or another chat template change the fingerprint; the path does not.
"""

import hashlib
from pathlib import Path

from engine.checkpoint.reading import unreadable

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors", "*.bin")
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


def fingerprint(directory: Path) -> str:
    """32 hex digits. Raises `InvalidParameter` for a file that cannot be read.

    Files are hashed whole, except large weights: of these, name, size and samples spread over the file are
    hashed, which takes milliseconds and differs between any two trained models.
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
    with path.open("rb") as file:
        if size <= NUM_SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        elif path.suffix in (".safetensors", ".bin"):
            for sample in range(NUM_SAMPLES):
                file.seek(sample * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        else:
            digest.update(hashlib.file_digest(file, "sha256").digest())
