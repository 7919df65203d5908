"""Turns token ids into text as they arrive, without incomplete characters and stop strings.

Invariants: the concatenated pieces do not depend on whether the tokens were sampled or resumed.
"""

import os.path
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

from engine.sampling_params import SamplingParams
from engine.text.byte_decoder import REPLACEMENT, ByteDecoder, TokenBytes
from engine.text.stop_strings import StopStrings

_CONTEXT = 6
"""Prompt tokens in the first decoding, which keep a space between prompt and output."""
_WINDOW = 16
"""The decoded window is shortened when it has more tokens than this."""
_MAX_PENDING = 3
"""An incomplete UTF-8 character lacks at most three bytes: further U+FFFD at the end are text."""

NO_END_TEXTS: Mapping[int, str] = MappingProxyType({})
Decode = Callable[[list[int]], str]


class Tokenizer(Protocol):
    """The part of a model's tokenizer that the engine uses."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Invalid UTF-8 becomes U+FFFD."""
        ...

    def decoded_bytes(self, skip_special_tokens: bool = True) -> TokenBytes | None:
        """The bytes of each token; None if they depend on the context."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens around it."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token `text`; None if there is none."""
        ...


class IncrementalDecoder:
    """Decodes one sequence token by token. An incomplete character is held until its last byte arrives.

    Decodes a short window of tokens, since the text of a token depends on its neighbours (spaces, bytes of
    one character), as in vLLM's `detokenize_incrementally`. A later token may change the text of earlier
    ones: a tokenizer with byte fallback turns a whole run of bytes into U+FFFD if its end is invalid. Text
    that was returned stays, and the tokens after it are decoded without it.
    """

    def __init__(self, decode: Decode, prompt_token_ids: list[int]) -> None:
        self._decode = decode
        self._window = _prompt_context(decode, prompt_token_ids)
        self._num_returned = len(self._window)
        self._returned = decode(self._window)

    def push(self, token_id: int) -> str:
        window = [*self._window, token_id]
        text = self._decode(window)
        self._window = window  # Only now: if decoding raises, the state does not change.
        if self._is_retracted(text):
            if self._may_be_restored(text):
                return ""
            text = self._drop_returned()
        if text.endswith(REPLACEMENT):
            return self._return_all_but_pending(text)
        returned, self._returned = self._returned, text
        if len(window) > _WINDOW:
            self._shorten()
        self._num_returned = len(self._window)
        return _new_text(text, returned)

    def close(self) -> str:
        """The incomplete character at the end, as U+FFFD."""
        text = self._decode(self._window)
        if self._is_retracted(text):
            text = self._drop_returned()
        new = _new_text(text, self._returned)
        self._returned = text
        return new

    def _is_retracted(self, text: str) -> bool:
        """Whether `text` lacks text that was returned, other than a character that the prompt started."""
        return not text.startswith(self._returned) and not self._returned.endswith(REPLACEMENT)

    def _may_be_restored(self, text: str) -> bool:
        """Whether more bytes may complete a character and so restore the returned text."""
        num_broken = len(text) - len(text.rstrip(REPLACEMENT))
        common = os.path.commonprefix([text, self._returned])  # noqa: RUF071 - of characters
        return 0 < num_broken <= len(self._returned[len(common) :].encode()) + _MAX_PENDING

    def _drop_returned(self) -> str:
        """Remove the tokens of the returned text from the window. Returns the text of the others."""
        lengths = range(len(self._window) - 1, 0, -1)
        num_returned = next(
            (n for n in lengths if self._decode(self._window[:n]) == self._returned), lengths.start
        )
        self._window, self._returned, self._num_returned = self._window[num_returned:], "", 0
        return self._decode(self._window)

    def _shorten(self) -> None:
        """Keep the tokens returned last as context, if they have text: without it a space would be lost."""
        context = self._window[self._num_returned :]
        if text := self._decode(context):
            self._window, self._returned = context, text

    def _return_all_but_pending(self, text: str) -> str:
        complete = text.rstrip(REPLACEMENT)
        complete += REPLACEMENT * max(0, len(text) - len(complete) - _MAX_PENDING)
        if len(complete) <= len(self._returned) or not complete.startswith(self._returned):
            return ""
        new = complete[len(self._returned) :]
        self._returned = complete
        if len(self._window) > _WINDOW:
            self._shorten_invalid(num_pending=len(text) - len(complete))
        return new

    def _shorten_invalid(self, num_pending: int) -> None:
        """In a run of invalid bytes, keep enough tokens to include all pending ones."""
        context = self._window[-_WINDOW // 2 :]
        text = self._decode(context)
        if text.endswith(REPLACEMENT * num_pending):
            self._window, self._returned = context, text[: len(text) - num_pending]
            self._num_returned = 0


class Detokenizer:
    """The text of one output, decoded and cut at its stop string.

    `end_texts`: texts of end tokens that belong to the output. Stop strings completed within the first
    `min_tokens` tokens are ignored. `stopped`: a stop string was found, and no more text follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        end_texts: Mapping[int, str] = NO_END_TEXTS,
    ) -> None:
        self._decoder = _decoder(tokenizer, prompt_token_ids, skips=params.skip_special_tokens)
        self._stop_strings = StopStrings(params.stop, is_included=params.include_stop_str_in_output)
        self._has_stop_strings = bool(params.stop)
        self.stopped = False
        self._end_texts = end_texts
        self._num_min_tokens_left = params.min_tokens

    def push(self, token_id: int) -> str:
        """The text that `token_id` releases."""
        text = self._decoder.push(token_id)
        if not self._has_stop_strings:
            return text
        self._num_min_tokens_left -= 1
        return self._cut(text)

    def close(self, end_token_id: int | None = None) -> str:
        """The text held back, at the end of the output, with the text of the end token."""
        text = self._cut(self._decoder.close()) + self._stop_strings.close()
        if self.stopped or end_token_id is None:
            return text
        return text + self._end_texts.get(end_token_id, "")

    def _cut(self, text: str) -> str:
        """Cut `text` at a stop string, unless the output must not end yet."""
        text = self._stop_strings.push(text, may_stop=self._num_min_tokens_left < 0)
        self.stopped = self._stop_strings.matched
        return text


def _decoder(
    tokenizer: Tokenizer, prompt_token_ids: list[int], *, skips: bool
) -> ByteDecoder | IncrementalDecoder:
    if token_bytes := tokenizer.decoded_bytes(skips):
        return ByteDecoder(token_bytes, prompt_token_ids)
    decode = tokenizer.decode if skips else partial(tokenizer.decode, skip_special_tokens=False)
    return IncrementalDecoder(decode, prompt_token_ids)


def _prompt_context(decode: Decode, prompt_token_ids: list[int]) -> list[int]:
    """The last tokens of the prompt that have text: special tokens alone would not keep a space."""
    length = _CONTEXT
    while length < len(prompt_token_ids) and not decode(prompt_token_ids[-length:]):
        length *= 2
    return prompt_token_ids[-length:]


def _new_text(text: str, returned: str) -> str:
    if text.startswith(returned):
        return text[len(returned) :]
    # The prompt ends inside a character, which the output completes.
    return text[len(os.path.commonprefix([text, returned])) :]  # noqa: RUF071 - of characters
