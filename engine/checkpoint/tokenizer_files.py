"""Checks that a model directory has a tokenizer, and that its settings can be read."""

from pathlib import Path

from engine.checkpoint.reading import open_checked, read_json, unusable
from engine.errors import InvalidParameter

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Files that hold a vocabulary, besides those that match `_LOOSE`."""
_LOOSE = ("*.model", "*.tiktoken")
_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
_TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")


def check_tokenizer_files(directory: Path) -> None:
    """Raise `InvalidParameter` if no file holds a vocabulary, or one of the files is invalid."""
    found = [directory / name for name in _VOCABULARIES if (directory / name).exists()]
    found += [path for pattern in _LOOSE for path in sorted(directory.glob(pattern)) if path not in found]
    broken = [path for name in _VOCABULARIES if (path := directory / name).is_symlink() and not path.exists()]
    if not found and not broken:
        raise InvalidParameter(
            "model", f"no tokenizer files in {directory} (looked for {', '.join((*_VOCABULARIES, *_LOOSE))})"
        )
    for path in (*found, *broken):
        _check(path)
    _check_merges(directory)


def check_settings_files(directory: Path) -> None:
    """Raise `InvalidParameter` if one of the settings files exists and is invalid."""
    for name in (*_SETTINGS, *_TEXTS):
        path = directory / name
        if path.exists() or path.is_symlink():
            _check(path)


def _check(path: Path) -> None:
    if path.suffix == ".json":
        content = read_json(path)
        if path.name == "tokenizer.json" and not isinstance(content.get("model"), dict):
            raise unusable(path, "has no `model`, so it is not a file of the tokenizers library")
    elif path.suffix in (".txt", ".jinja"):
        _check_text(path)
    else:
        open_checked(path).close()


def _check_text(path: Path) -> None:
    with open_checked(path) as file:
        try:
            file.read().decode()
        except UnicodeDecodeError as error:
            raise unusable(path, f"is not UTF-8 text (byte {error.start})") from error


def _check_merges(directory: Path) -> None:
    """transformers loads a byte-pair vocabulary without its merges silently, and encodes letter by letter."""
    others = (*_LOOSE, "tokenizer.json", "vocab.txt")
    if not (directory / "vocab.json").exists() or any(any(directory.glob(name)) for name in others):
        return
    if not (directory / "merges.txt").exists():
        raise unusable(directory / "vocab.json", "exists without merges.txt and tokenizer.json")
