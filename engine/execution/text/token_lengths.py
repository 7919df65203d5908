"""How many bytes of text one token can stand for at most, read from a tokenizer's own description.

The bound lets a text be refused before it is tokenized. It holds only where every part of the text becomes
tokens and no token stands for text of any length. There is none (None) with:

- a normalizer or pre-tokenizer that drops text (spaces, control characters, accents), or is unknown;
- an unknown token that stands for a whole word or a run of characters, or characters that are dropped;
- added tokens that take the spaces beside them.
"""

import json
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

# The most bytes of UTF-8 that become one. Decomposing takes 3 bytes for one (U+212A), by compatibility 4
# (U+1D400), syllable's; before, decomposing can take 1.5 (U+212B) or, by compatibility, 4 (U+1D400) for
# one.
_SHRINKING = {
    "NFC": 9.0,
    "NFKC": 12.0,
    "NFD": 3.0,
    "NFKD": 4.0,
    "Lowercase": 3.0,
    "ByteLevel": 1.0,
    "Prepend": 1.0,
}
# None of these drops a part of the text, unless it is told to.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts", "FixedLength"}
_LONGEST_CHARACTER = 4


def longest_token_bytes(backend: Any) -> float | None:
    """Bytes of text for each token at most, with a tokenizer of the `tokenizers` library; None: no bound."""
    described = json.loads(backend.to_str())
    shrinking = _shrinking(described["normalizer"])
    splitters = _flat(described["pre_tokenizer"], "pretokenizers")
    if shrinking is None or any(_drops(one) for one in splitters):
        return None
    added = described["added_tokens"]
    if any(one["lstrip"] or one["rstrip"] for one in added):
        return None
    steps = [*splitters, *_flat(described["normalizer"], "normalizers")]
    spells_bytes = any(step["type"] == "ByteLevel" for step in steps)
    pieces = backend.get_vocab(with_added_tokens=False)
    if not _covers_all_text(described["model"], pieces, spells_bytes=spells_bytes):
        return None
    # A character of a byte-level piece is one byte.
    longest = max((len(piece) if spells_bytes else len(piece.encode()) for piece in pieces), default=0)
    longest = max([longest, _LONGEST_CHARACTER, *(len(one["content"].encode()) for one in added)])
    return longest * shrinking


def _shrinking(normalizer: Any) -> float | None:
    """How much shorter in bytes a text can become; None: any much."""
    product = 1.0
    for step in _flat(normalizer, "normalizers"):
        factor = _replaced(step) if step["type"] == "Replace" else _SHRINKING.get(step["type"])
        if factor is None:
            return None
        product *= factor
    return product


def _replaced(step: dict[str, Any]) -> float | None:
    old, new = step["pattern"].get("String"), step["content"]
    return max(1.0, len(old.encode()) / len(new.encode())) if old and new else None


def _drops(splitter: dict[str, Any]) -> bool:
    return splitter["type"] not in _KEEPING or splitter.get("behavior") == "Removed"


def _covers_all_text(model: dict[str, Any], pieces: Iterable[str], *, spells_bytes: bool) -> bool:
    """Whether every byte of a text becomes a part of some token of bounded length."""
    has = pieces if isinstance(pieces, dict) else set(pieces)
    if spells_bytes and all(character in has for character in _byte_characters()):
        return model["type"] in ("BPE", "Unigram")
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in has for byte in range(256)):
        return model["type"] in ("BPE", "Unigram")
    # An unknown token for each character, not for a run of them.
    return model["type"] == "BPE" and bool(model.get("unk_token")) and not model.get("fuse_unk")


def _byte_characters() -> list[str]:
    characters: Any = bytes_to_unicode  # typed as Any: transformers gives it no types
    return list(characters().values())


def _flat(step: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence of steps, in their order."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for one in step[name] for inner in _flat(one, name)]
