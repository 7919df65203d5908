"""Decodes tokens one by one, for tokenizers whose tokens have the same bytes in any context.

The concatenated texts equal the tokenizer's own decoding. For other tokenizers see `IncrementalDecoder` in
`engine/text/detokenizer.py`.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable

REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
"""Longest character in UTF-8."""

_Utf8 = getincrementaldecoder("utf-8")


class TokenBytes:
    """`bytes_of`: the UTF-8 bytes of a token, which may be part of a character.

    `separator`: text that is omitted at the start of a text.
    """

    __slots__ = ("bytes_of", "separator", "texts")

    def __init__(self, bytes_of: Callable[[int], bytes], separator: str = "") -> None:
        self.bytes_of = bytes_of
        self.separator = separator
        #: Cache of the texts of tokens that neither start nor end inside a character.
        self.texts: dict[int, str] = {}

    def bytes_at_end(self, token_ids: list[int]) -> bytes:
        """The last bytes of a text: at least as many as a character may have, or all."""
        end = b""
        for token_id in reversed(token_ids):
            end = self.bytes_of(token_id) + end
            if len(end) >= _MAX_CHARACTER_BYTES:
                break
        return end


class ByteDecoder:
    """Decodes one sequence token by token. An incomplete character is held until its last byte arrives."""

    __slots__ = ("_at_character_boundary", "_omitted", "_texts", "_token_bytes", "_utf8")

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: list[int]) -> None:
        self._token_bytes = token_bytes
        self._texts = token_bytes.texts
        self._utf8 = _Utf8("replace")
        before = token_bytes.bytes_at_end(prompt_token_ids)
        self._utf8.decode(before)
        # A character started by the prompt belongs to the output if the output completes it.
        self._omitted = (
            REPLACEMENT if self._has_partial_character() else "" if before else token_bytes.separator
        )
        self._at_character_boundary = not self._omitted

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes. If the tokenizer raises, the state does not change."""
        if self._at_character_boundary and (text := self._texts.get(token_id)) is not None:
            return text
        return self._add(token_id, self._token_bytes.bytes_of(token_id))

    def close(self) -> str:
        """The incomplete character at the end of the sequence, as U+FFFD."""
        return self._without_omitted(self._utf8.decode(b"", final=True))

    def _add(self, token_id: int, new: bytes) -> str:
        was_at_boundary = self._at_character_boundary
        text = self._without_omitted(self._utf8.decode(new))
        self._at_character_boundary = not (self._omitted or self._has_partial_character())
        if was_at_boundary and self._at_character_boundary:
            self._texts[token_id] = text
        return text

    def _has_partial_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _without_omitted(self, text: str) -> str:
        if not (text and self._omitted):
            return text
        omitted, self._omitted = self._omitted, ""
        return text.removeprefix(omitted)
