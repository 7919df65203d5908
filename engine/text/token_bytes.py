"""Reads the UTF-8 bytes of each token from the decoder of a tokenizer of the `tokenizers` library.

A character may span several tokens, each of which decodes to U+FFFD alone. A decoder that is not understood
is refused, not guessed.
"""

import json
import re
from collections.abc import Callable, Set
from typing import Any

from engine.text.byte_decoder import TokenBytes

PieceBytes = Callable[[str], bytes]
"""The bytes of a piece, a token as the vocabulary writes it."""

NUM_SAMPLES = 512
"""Vocabulary tokens on which `context_free_bytes` compares, besides all added tokens."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_BYTE = "\uffff"
# `Fuse` only joins; `Strip` removes a space at the start of a whole text.
_KNOWN = {"ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


# To Latin-1, in one pass of `str.translate`, since vocabularies are large.
_TO_LATIN = str.maketrans(
    {chr(code): _NO_BYTE for code in range(256)}
    | {character: chr(byte) for byte, character in byte_characters().items()}
)


def piece_bytes_of(backend: Any) -> PieceBytes | None:
    """The function from pieces to bytes of a tokenizer; None if its decoder is not understood.

    Byte-level BPE writes a printable character for each byte. SentencePiece writes a space as U+2581 and
    bytes outside its vocabulary as `<0xE4>`.
    """
    if backend.decoder is None:
        return None
    steps = _decoder_steps(backend.decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if not kinds & {"ByteFallback", "Metaspace"} or not kinds <= _KNOWN:
        return None
    replacements = [pair for step in steps if (pair := _replacement(step)) is not None]
    return _sentencepiece(replacements, has_bytes="ByteFallback" in kinds)


def context_free_bytes(backend: Any, added: Set[int], skipped: Set[int], *, skips: bool) -> TokenBytes | None:
    """The bytes that each token adds to a decoded text; None if they depend on its neighbours.

    `added`: ids of added tokens. `skipped`: special ids, without text if `skips`. Known decoders are still
    compared with what the tokenizer decodes.

    SentencePiece turns a whole run of bytes into U+FFFD if its end is not valid UTF-8. A stream has sent the
    beginning of the run by then, so here only the invalid bytes become U+FFFD, as with byte-level BPE.
    """
    found = _pieces_and_separator(backend)
    if found is None:
        return None
    piece_bytes, prefix, separator = found

    def bytes_of(token_id: int) -> bytes:
        piece = backend.id_to_token(token_id)
        # None: an id that only the model has.
        return b"" if piece is None or (skips and token_id in skipped) else prefix + piece_bytes(piece)

    token_bytes = TokenBytes(bytes_of, separator)
    return token_bytes if _agrees(backend, token_bytes, sorted(added | skipped), skips=skips) else None


def _pieces_and_separator(backend: Any) -> tuple[PieceBytes, bytes, str] | None:
    """The bytes of a piece, what precedes each piece, and what is stripped at the start of a text."""
    if backend.decoder is None:
        # Pieces are joined by spaces.
        return str.encode, b" ", " "
    steps = _decoder_steps(backend.decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, b"", ""
    piece_bytes = piece_bytes_of(backend)
    has_regex = any("Regex" in step.get("pattern", {}) for step in steps)
    if piece_bytes is None or has_regex or "ByteLevel" in kinds:
        return None
    separator = _stripped_at_start(steps)
    return None if separator is None else (piece_bytes, b"", separator)


def _stripped_at_start(steps: list[dict[str, Any]]) -> str | None:
    """What a SentencePiece decoder strips at the start of a text; None if it strips anywhere else."""
    strips = [step for step in steps if step["type"] == "Strip"]
    if not strips:
        prepends = (step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace")
        return " " if any(scheme != "never" for scheme in prepends) else ""
    kinds = [step["type"] for step in steps]
    # Before `Fuse`, a step sees single tokens.
    is_last = kinds[-1] == "Strip" and "Fuse" in kinds and len(strips) == 1
    only = strips[0]
    return str(only["content"]) if is_last and only["start"] == 1 and not only["stop"] else None


def _agrees(backend: Any, token_bytes: TokenBytes, special: list[int], *, skips: bool) -> bool:
    """Whether the bytes of all `special` tokens and a sample of the others are what `backend` decodes."""
    size = backend.get_vocab_size(with_added_tokens=False)
    sample = [*range(0, size, max(1, size // NUM_SAMPLES)), *special, *reversed(special)]
    sample += range(min(size, 8))
    # Single bytes of a byte fallback form no text; those of whole characters do.
    token_ids = [one for one in sample if _byte_of(backend.id_to_token(one) or "") is None]
    token_ids += _fallback_ids(backend, "\u00e9\u4e16\U0001f44b")
    whole = b"".join(map(token_bytes.bytes_of, token_ids)).decode(errors="replace")
    decoded: str = backend.decode(token_ids, skips)
    return decoded == whole.removeprefix(token_bytes.separator)


def _fallback_ids(backend: Any, text: str) -> list[int]:
    """The ids of the bytes of `text`; empty without a byte fallback."""
    token_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [] if None in token_ids else token_ids


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder in order, each with its `type`."""
    return flat_steps(json.loads(decoder.__getstate__()), "decoders")


def flat_steps(step: Any, name: str) -> list[dict[str, Any]]:
    """A step of a tokenizer's description as a list; a `Sequence` holds its steps under `name`."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for one in step[name] for inner in flat_steps(one, name)]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        # The decoder too takes a piece with any other character literally.
        return piece.encode()


def _byte_of(piece: str) -> int | None:
    """The byte of a piece of a byte fallback; None for any other piece."""
    match = _BYTE.fullmatch(piece)
    return int(match[1], 16) if match else None


def _sentencepiece(replacements: list[tuple[str, str]], *, has_bytes: bool) -> PieceBytes:
    def piece_bytes(piece: str) -> bytes:
        if has_bytes and (byte := _byte_of(piece)) is not None:
            return bytes([byte])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return piece_bytes
