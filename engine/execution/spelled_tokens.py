"""What each token adds to a text, read from tokenizers whose decoder looks at no neighbours.

Law: text put together so is what the tokenizer decodes. Which decoders are of that kind is known, and each
tokenizer is tried all the same: one that disagrees is not read so.
"""

from collections.abc import Callable, Set
from typing import Any

from engine.execution.token_bytes import spell_byte_level, steps_of
from engine.spelled_text import Spelling

NUM_TRIED = 512
"""Tokens of the vocabulary in a trial, beside all that were added to it."""


def spelling_of_texts(backend: Any, added: Set[int], skipped: Set[int], *, skips: bool) -> Spelling | None:
    """Of a tokenizer of the `tokenizers` library; None if it is of another kind, or disagrees.

    `added`: ids beside the vocabulary. `skipped`: special ones, which leave no text where `skips` is true.
    """
    spell: Callable[[str], bytes]
    if backend.decoder is None:
        # Pieces are joined by spaces.
        spell, separator = str.encode, " "
    elif [step["type"] for step in steps_of(backend.decoder)] == ["ByteLevel"]:
        spell, separator = spell_byte_level, ""
    else:
        return None
    spelling = Spelling(_Pieces(backend, skipped if skips else frozenset(), spell, separator), separator)
    return spelling if _agrees(backend, spelling, sorted(added | skipped), skips=skips) else None


class _Pieces:
    """The bytes of a token; none of one that is skipped, or that only the model knows."""

    def __init__(
        self,
        backend: Any,
        skipped: Set[int],
        spell: Callable[[str], bytes],
        separator: str,
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._spell = spell
        self._separator = separator.encode()

    def __call__(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None or token_id in self._skipped:
            return b""
        return self._separator + self._spell(piece)


def _agrees(backend: Any, spelling: Spelling, special: list[int], *, skips: bool) -> bool:
    """Whether a text of all `special` tokens and a part of the others is decoded to what is put together."""
    size = backend.get_vocab_size(with_added_tokens=False)
    token_ids = [
        *range(0, size, max(1, size // NUM_TRIED)),
        *special,
        *reversed(special),
        *range(min(size, 8)),
    ]
    whole = b"".join(map(spelling.bytes_of, token_ids)).decode(errors="replace")
    decoded: str = backend.decode(token_ids, skips)
    return decoded == whole.removeprefix(spelling.separator)
