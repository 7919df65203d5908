"""Token ids to text, as it comes, without a half character and without a stop string.

Law: the pieces joined are the text of all ids, however they came. `final_text` is that text; every path,
live, resumed or read afterwards, is the same fold. Knows no tokenizer library.
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
"""Prompt tokens that the first decode begins with, so that a space between prompt and output is not lost."""
_WINDOW = 16
"""Tokens after which the window is cut back, so that a decode never looks at the whole text."""
_MAX_PENDING = 3
"""A character of UTF-8 lacks at most three bytes: more U+FFFD than that at the end are text."""


NO_END_TEXTS: Mapping[int, str] = MappingProxyType({})
Decode = Callable[[list[int]], str]


class Tokenizer(Protocol):
    """What the engine needs of a model's tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that form no character are U+FFFD."""
        ...

    def spelling(self, skip_special_tokens: bool = True) -> TokenBytes | None:
        """What each token adds to a text, wherever it stands; None if that depends on its neighbours."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text` as a part of some text: no special tokens are added."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None if there is none."""
        ...


class IncrementalDecoder:
    """The text of one sequence, token by token; an incomplete character waits for its other bytes.

    Decodes a short window, since the text of a token depends on its neighbours (spaces, bytes of one
    character), as in vLLM's `detokenize_incrementally`. A decoder may change its mind about text that was
    sent: one with byte fallback makes U+FFFD of a whole run of bytes when its end is invalid. What was sent
    stays then, and the tokens behind it are decoded without it.
    """

    def __init__(self, decode: Decode, prompt_token_ids: list[int]) -> None:
        self._decode = decode
        self._window = _context(decode, prompt_token_ids)
        self._num_told = len(self._window)
        self._told = decode(self._window)

    def push(self, token_id: int) -> str:
        window = [*self._window, token_id]
        text = self._decode(window)
        self._window = window  # not before: a token that cannot be decoded leaves the rest as it was
        if self._is_taken_back(text):
            if self._may_be_restored(text):
                return ""
            text = self._leave_out_told()
        if text.endswith(REPLACEMENT):
            return self._tell_all_but_pending(text)
        told, self._told = self._told, text
        if len(window) > _WINDOW:
            self._cut_back()
        self._num_told = len(self._window)
        return _beyond(text, told)

    def close(self) -> str:
        """The incomplete character at the end, as U+FFFD."""
        text = self._decode(self._window)
        if self._is_taken_back(text):
            text = self._leave_out_told()
        new = _beyond(text, self._told)
        self._told = text
        return new

    def _is_taken_back(self, text: str) -> bool:
        """Whether `text` lacks what was told, and not for a character that the prompt began."""
        return not text.startswith(self._told) and not self._told.endswith(REPLACEMENT)

    def _may_be_restored(self, text: str) -> bool:
        """Whether the bytes behind what was told may yet complete a character, and bring it back."""
        num_broken = len(text) - len(text.rstrip(REPLACEMENT))
        common = os.path.commonprefix([text, self._told])  # noqa: RUF071 - of characters
        return 0 < num_broken <= len(self._told[len(common) :].encode()) + _MAX_PENDING

    def _leave_out_told(self) -> str:
        """Keep only the tokens behind the text that was told, and return their text."""
        lengths = range(len(self._window) - 1, 0, -1)
        num_told = next((n for n in lengths if self._decode(self._window[:n]) == self._told), lengths.start)
        self._window, self._told, self._num_told = self._window[num_told:], "", 0
        return self._decode(self._window)

    def _cut_back(self) -> None:
        """Keep the tokens told last as context, if they have text: without, a space would be lost."""
        context = self._window[self._num_told :]
        if told := self._decode(context):
            self._window, self._told = context, told

    def _tell_all_but_pending(self, text: str) -> str:
        ripe = text.rstrip(REPLACEMENT)
        ripe += REPLACEMENT * max(0, len(text) - len(ripe) - _MAX_PENDING)
        if len(ripe) <= len(self._told) or not ripe.startswith(self._told):
            return ""
        new = ripe[len(self._told) :]
        self._told = ripe
        if len(self._window) > _WINDOW:
            self._cut_back_broken(num_pending=len(text) - len(ripe))
        return new

    def _cut_back_broken(self, num_pending: int) -> None:
        """In a run of broken bytes, keep enough tokens that all pending ones are among them."""
        context = self._window[-_WINDOW // 2 :]
        text = self._decode(context)
        if text.endswith(REPLACEMENT * num_pending):
            self._window, self._told = context, text[: len(text) - num_pending]
            self._num_told = 0


class Detokenizer:
    """The text of one output that may be told: decoded, and cut at its stop string.

    `end_texts`: text that tokens leave which end the output. Stop strings that one of the first `min_tokens`
    tokens completes are text like any other. `stopped`: one was found, and nothing more will be told.
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
        self._may_hold_back = bool(params.stop)
        self.stopped = False
        self._end_texts = end_texts
        self._num_left_unstopped = params.min_tokens

    def push(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if not self._may_hold_back:
            return text
        self._num_left_unstopped -= 1
        return self._cut(text)

    def close(self, end_token_id: int | None = None) -> str:
        """What was held back, at the end of the output; with the text of the token that ended it."""
        text = self._cut(self._decoder.close()) + self._stop_strings.close()
        if self.stopped or end_token_id is None:
            return text
        return text + self._end_texts.get(end_token_id, "")

    def _cut(self, text: str) -> str:
        """At a stop string, if the token pushed last is beyond those that may not end the output."""
        text = self._stop_strings.push(text, may_stop=self._num_left_unstopped < 0)
        self.stopped = self._stop_strings.matched
        return text


def final_text(
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
    params: SamplingParams,
    *,
    end_token_id: int | None = None,
    end_texts: Mapping[int, str] = NO_END_TEXTS,
) -> str:
    """The text of a finished output, cut at its stop string. `output_token_ids`: without an ending token."""
    stream = Detokenizer(tokenizer, prompt_token_ids, params, end_texts)
    return "".join(map(stream.push, output_token_ids)) + stream.close(end_token_id)


def _decoder(
    tokenizer: Tokenizer, prompt_token_ids: list[int], *, skips: bool
) -> ByteDecoder | IncrementalDecoder:
    if spelling := tokenizer.spelling(skips):
        return ByteDecoder(spelling, prompt_token_ids)
    decode = tokenizer.decode if skips else partial(tokenizer.decode, skip_special_tokens=False)
    return IncrementalDecoder(decode, prompt_token_ids)


def _context(decode: Decode, prompt_token_ids: list[int]) -> list[int]:
    """The end of the prompt that has text: special tokens alone would not show that text went before."""
    length = _CONTEXT
    while length < len(prompt_token_ids) and not decode(prompt_token_ids[-length:]):
        length *= 2
    return prompt_token_ids[-length:]


def _beyond(text: str, told: str) -> str:
    if text.startswith(told):
        return text[len(told) :]
    # A prompt that ends inside a character: what the output makes of it belongs to the output.
    return text[len(os.path.commonprefix([text, told])) :]  # noqa: RUF071 - of characters
