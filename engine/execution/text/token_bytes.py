"""The exact bytes of a token: a character may be spread over several, each of which decodes to U+FFFD alone.

Law: the bytes of an output's tokens, one after the other, are its text in UTF-8. Read from the tokenizer's
own decoder, which says how its vocabulary spells bytes; one that is not understood is refused, not guessed.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

TokenBytes = Callable[[str], bytes]
"""From a piece, as the vocabulary has it, to its bytes."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Typed as Any: transformers gives it no types.
_characters: Any = bytes_to_unicode
_NO_BYTE = "\uffff"
# A character that spells a byte becomes the one that Latin-1 has for it; a table, as vocabularies are large.
_TO_LATIN = str.maketrans(
    {chr(code): _NO_BYTE for code in range(256)}
    | {character: chr(byte) for byte, character in _characters().items()}
)


def token_bytes_of(backend: Any) -> TokenBytes | None:
    """How a tokenizer of the `tokenizers` library spells bytes; None if its decoder is not understood.

    Byte-level BPE (GPT-2) has a printable character for each byte. SentencePiece writes a space as U+2581,
    and bytes that its vocabulary lacks as `<0xE4>`.
    """
    if backend.decoder is None:
        return None
    steps = steps_of(backend.decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return spell_byte_level
    if not kinds & {"ByteFallback", "Metaspace"} or not kinds <= _KNOWN:
        return None
    replacements = [pair for step in steps if (pair := _replacement(step)) is not None]
    return _sentencepiece(replacements, has_bytes="ByteFallback" in kinds)


# Fuse only joins, and Strip takes off a space at the start of a whole text.
_KNOWN = {"ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}


def steps_of(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder of the `tokenizers` library, in their order, each with its `type`."""
    return _steps(json.loads(decoder.__getstate__()))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def spell_byte_level(piece: str) -> bytes:
    """The bytes of a piece of byte-level BPE."""
    try:
        return piece.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        # A piece that is not spelt in bytes stands for itself; the decoder does the same.
        return piece.encode()


def byte_of(piece: str) -> int | None:
    """The byte that a piece of a byte fallback stands for; None for any other piece."""
    match = _BYTE.fullmatch(piece)
    return int(match[1], 16) if match else None


def _sentencepiece(replacements: list[tuple[str, str]], *, has_bytes: bool) -> TokenBytes:
    def spell(piece: str) -> bytes:
        if has_bytes and (byte := byte_of(piece)) is not None:
            return bytes([byte])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return spell
