"""Bounds the bytes of text that one token can stand for, from a tokenizer's own description.

With the bound, a text that cannot fit is refused before it is tokenized. It exists only if every part of a
text becomes tokens and no token stands for text of any length. There is none (None) with:

- a normalizer or pre-tokenizer that drops text (spaces, control characters, accents), or an unknown one;
- an unknown token that stands for a whole word or a run of characters, or characters that are dropped;
- added tokens that absorb the spaces beside them.
"""

import json
from collections.abc import Iterable
from typing import Any

from engine.text.token_bytes import byte_characters, flat_steps

# The most bytes of UTF-8 that become one byte. Decomposition shrinks U+212A from 3 bytes to 1; compatibility
# decomposition shrinks U+1D400 from 4 to 1. Composition (NFC, NFKC) shrinks the decomposed text by up to 3
# more (a Hangul syllable).
_SHRINKING = {
    "NFC": 9.0,
    "NFKC": 12.0,
    "NFD": 3.0,
    "NFKD": 4.0,
    "Lowercase": 3.0,
    "ByteLevel": 1.0,
    "Prepend": 1.0,
}
# Pre-tokenizers that drop no text unless configured to.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts", "FixedLength"}
_MAX_CHARACTER_BYTES = 4


def longest_token_bytes(backend: Any) -> float | None:
    """The most bytes of text per token of a `tokenizers` tokenizer; None: no bound."""
    described = json.loads(backend.to_str())
    shrinking = _shrinking(described["normalizer"])
    splitters = flat_steps(described["pre_tokenizer"], "pretokenizers")
    if shrinking is None or any(_drops(one) for one in splitters):
        return None
    added = described["added_tokens"]
    if any(one["lstrip"] or one["rstrip"] for one in added):
        return None
    steps = [*splitters, *flat_steps(described["normalizer"], "normalizers")]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    pieces = backend.get_vocab(with_added_tokens=False)
    if not _covers_all_text(described["model"], pieces, is_byte_level=is_byte_level):
        return None
    # A character of a byte-level piece is one byte.
    longest = max((len(piece) if is_byte_level else len(piece.encode()) for piece in pieces), default=0)
    longest = max([longest, _MAX_CHARACTER_BYTES, *(len(one["content"].encode()) for one in added)])
    return longest * shrinking


def _shrinking(normalizer: Any) -> float | None:
    """The largest factor by which the normalizer shortens a text in bytes; None: unbounded."""
    product = 1.0
    for step in flat_steps(normalizer, "normalizers"):
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


def _covers_all_text(model: dict[str, Any], pieces: Iterable[str], *, is_byte_level: bool) -> bool:
    """Whether every byte of a text becomes part of a token of bounded length."""
    has = set(pieces)
    if is_byte_level and all(character in has for character in byte_characters().values()):
        return model["type"] in ("BPE", "Unigram")
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in has for byte in range(256)):
        return model["type"] in ("BPE", "Unigram")
    # One unknown token for each character, not for a run of them.
    return model["type"] == "BPE" and bool(model.get("unk_token")) and not model.get("fuse_unk")
