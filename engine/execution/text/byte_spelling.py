"""What each token adds to a text, read from tokenizers whose decoder looks at no neighbours.

Invariant: valid text put together so is what the tokenizer decodes. Which decoders are of that kind is known,
and each tokenizer is compared all the same: one that disagrees is decoded in windows.

Tokenizers with byte fallback (SentencePiece) are read so as well, although their decoder turns all of a run
of bytes into U+FFFD when its end is not valid UTF-8. A stream has sent the beginning of the run by then.
Here only the bytes that form no character become U+FFFD, as with byte-level tokenizers.
"""

from collections.abc import Callable, Set
from typing import Any

from engine.execution.text.token_bytes import byte_of, spell_byte_level, steps_of, token_bytes_of
from engine.text.byte_decoder import TokenBytes

NUM_TRIED = 512
"""Tokens of the vocabulary in a trial, beside all that were added to it."""


def token_bytes_of_texts(
    backend: Any, added: Set[int], skipped: Set[int], *, skips: bool
) -> TokenBytes | None:
    """Of a tokenizer of the `tokenizers` library; None if it is of another kind, or disagrees.

    `added`: ids beside the vocabulary. `skipped`: special ones, which leave no text where `skips` is true.
    """
    found = _spell_and_separator(backend)
    if found is None:
        return None
    spell, first, separator = found
    spelling = TokenBytes(_Pieces(backend, skipped if skips else frozenset(), spell, first), separator)
    return spelling if _agrees(backend, spelling, sorted(added | skipped), skips=skips) else None


def _spell_and_separator(backend: Any) -> tuple[Callable[[str], bytes], str, str] | None:
    """How a piece is spelled, what stands before each piece, and what is left out where a text begins."""
    if backend.decoder is None:
        # Pieces are joined by spaces.
        return str.encode, " ", " "
    steps = steps_of(backend.decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return spell_byte_level, "", ""
    spell = token_bytes_of(backend)
    has_regex = any("Regex" in step.get("pattern", {}) for step in steps)
    if spell is None or has_regex or "ByteLevel" in kinds:
        return None
    separator = _stripped_at_start(steps)
    return None if separator is None else (spell, "", separator)


def _stripped_at_start(steps: list[dict[str, Any]]) -> str | None:
    """What a SentencePiece decoder takes off the start of a text; None if it strips anything else."""
    strips = [step for step in steps if step["type"] == "Strip"]
    if not strips:
        prepends = (step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace")
        return " " if any(scheme != "never" for scheme in prepends) else ""
    kinds = [step["type"] for step in steps]
    # Before `Fuse`, a step looks at each token and not at the text.
    is_last = kinds[-1] == "Strip" and "Fuse" in kinds and len(strips) == 1
    only = strips[0]
    return str(only["content"]) if is_last and only["start"] == 1 and not only["stop"] else None


class _Pieces:
    """The bytes of a token; none of one that is skipped, or that only the model knows."""

    def __init__(
        self,
        backend: Any,
        skipped: Set[int],
        spell: Callable[[str], bytes],
        first: str,
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._spell = spell
        self._first = first.encode()

    def __call__(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None or token_id in self._skipped:
            return b""
        return self._first + self._spell(piece)


def _agrees(backend: Any, spelling: TokenBytes, special: list[int], *, skips: bool) -> bool:
    """Whether a text of all `special` tokens and a part of the others is decoded to what is put together."""
    size = backend.get_vocab_size(with_added_tokens=False)
    sample = [*range(0, size, max(1, size // NUM_TRIED)), *special, *reversed(special), *range(min(size, 8))]
    # Single bytes of a byte fallback form no text, but where they are those of characters.
    token_ids = [one for one in sample if byte_of(backend.id_to_token(one) or "") is None]
    token_ids += _fallback_bytes(backend, "\u00e9\u4e16\U0001f44b")
    whole = b"".join(map(spelling.bytes_of, token_ids)).decode(errors="replace")
    decoded: str = backend.decode(token_ids, skips)
    return decoded == whole.removeprefix(spelling.separator)


def _fallback_bytes(backend: Any, text: str) -> list[int]:
    """The ids of the bytes of `text` in a vocabulary with byte fallback; none in any other."""
    token_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [] if None in token_ids else token_ids
