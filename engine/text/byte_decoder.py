"""Token ids to text where each token adds the same bytes wherever it stands: nothing is decoded twice.

Law: the pieces joined are what the tokenizer decodes, as with the window of `engine/text/detokenizer.py`,
which is for tokenizers that look at neighbours. Knows no tokenizer library.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""

_Utf8 = getincrementaldecoder("utf-8")


class TokenBytes:
    """`bytes_of`: what a token adds to a text, in UTF-8 and perhaps parts of a character.

    `separator`: what of that is left out where a text begins.
    """

    __slots__ = ("bytes_of", "separator", "texts")

    def __init__(self, bytes_of: Callable[[int], bytes], separator: str = "") -> None:
        self.bytes_of = bytes_of
        self.separator = separator
        #: Of tokens that were asked for and neither end nor begin within a character.
        self.texts: dict[int, str] = {}

    def bytes_at_end(self, token_ids: list[int]) -> bytes:
        """The last bytes of a text, as many as a character may have; all of a short one."""
        end = b""
        for token_id in reversed(token_ids):
            end = self.bytes_of(token_id) + end
            if len(end) >= _LONGEST_CHARACTER:
                break
        return end


class ByteDecoder:
    """The text of one sequence, token by token; an incomplete character waits for its other bytes."""

    __slots__ = ("_is_between_characters", "_left_out", "_spelling", "_texts", "_utf8")

    def __init__(self, spelling: TokenBytes, prompt_token_ids: list[int]) -> None:
        self._spelling = spelling
        self._texts = spelling.texts
        self._utf8 = _Utf8("replace")
        before = spelling.bytes_at_end(prompt_token_ids)
        self._utf8.decode(before)
        # A character that the prompt began is the output's if that completes it, and else the prompt's.
        self._left_out = REPLACEMENT if self._is_inside_character() else "" if before else spelling.separator
        self._is_between_characters = not self._left_out

    def push(self, token_id: int) -> str:
        """Raises what the tokenizer raises; nothing has changed then."""
        if self._is_between_characters and (text := self._texts.get(token_id)) is not None:
            return text
        return self._add(token_id, self._spelling.bytes_of(token_id))

    def close(self) -> str:
        """The incomplete character at the end, as U+FFFD."""
        return self._told(self._utf8.decode(b"", final=True))

    def _add(self, token_id: int, new: bytes) -> str:
        was_between = self._is_between_characters
        text = self._told(self._utf8.decode(new))
        self._is_between_characters = not (self._left_out or self._is_inside_character())
        if was_between and self._is_between_characters:
            self._texts[token_id] = text
        return text

    def _is_inside_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _told(self, text: str) -> str:
        if not (text and self._left_out):
            return text
        left_out, self._left_out = self._left_out, ""
        return text.removeprefix(left_out)
