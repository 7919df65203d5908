"""Checks that a model directory has a tokenizer, and that its files and the other JSON files can be read."""

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
"""Any of these, or a `*.model` or `*.tiktoken` of another name, holds the vocabulary."""
_LOOSE = ("*.model", "*.tiktoken")
_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
_TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")


def check_tokenizer_files(directory: Path) -> None:
    """Raise `InvalidParameter` if no file holds a vocabulary, or one of the files cannot be used."""
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
    """Raise `InvalidParameter` if a file of settings beside the weights exists and cannot be used."""
    for name in (*_SETTINGS, *_TEXTS):
        path = directory / name
        if path.exists() or path.is_symlink():
            _check(path)


def _check(path: Path) -> None:
    if path.suffix == ".json":
        content = read_json(path)
        if path.name == "tokenizer.json" and not isinstance(content.get("model"), dict):
            raise unusable(path, "has no `model`, so it is no tokenizer of the library tokenizers")
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
    """Without its merges, a byte-pair vocabulary is loaded silently and spells text letter by letter."""
    others = (*_LOOSE, "tokenizer.json", "vocab.txt")
    if not (directory / "vocab.json").exists() or any(any(directory.glob(name)) for name in others):
        return
    if not (directory / "merges.txt").exists():
        raise unusable(directory / "vocab.json", "is there without merges.txt and without tokenizer.json")
