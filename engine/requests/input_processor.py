"""Checks a request's token ids and resolves the texts in its parameters to token ids, when it is added."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.constraints import Constraints
from engine.errors import InvalidParameter
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Tokenizer
from engine.text.pattern_automaton import automaton_of
from engine.validation import excerpt


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """Parameters as token ids. `end_texts`: the text of those end tokens that appear in the output."""

    constraints: Constraints
    end_texts: Mapping[int, str] = field(default_factory=dict)


class InputProcessor:
    """Checks and resolves requests against one model's vocabulary and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises `InvalidParameter` for token ids outside the vocabulary, and for an empty prompt."""
        if not prompt_token_ids:
            raise InvalidParameter("prompt", "must have at least one token")
        self._check_ids("prompt", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())

    def check_resumed(self, token_ids: Iterable[object]) -> None:
        """Raises `InvalidParameter` for token ids outside the vocabulary."""
        self._check_ids("resumed", token_ids)

    def resolve(self, params: SamplingParams) -> ResolvedParams:
        """Raises `InvalidParameter` if a bad word has no tokens."""
        stops = {self._tokenizer.special_token_id(stop): stop for stop in params.stop}
        special_stops = {token_id: stop for token_id, stop in stops.items() if token_id is not None}
        ends = {*params.stop_token_ids, *special_stops}
        constraints = Constraints(
            end_token_ids=frozenset(ends if params.ignore_eos else ends | self._eos_token_ids),
            bad_token_ids=tuple(
                dict.fromkeys(ids for word in params.bad_words for ids in self._encode(word))
            ),
        )
        return ResolvedParams(constraints, special_stops if params.include_stop_str_in_output else {})

    def _encode(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of `word` at the start of a text and after a space.

        Both are forbidden: a tokenizer may have a token only for the word with its space.
        """
        try:
            variants = [tuple(self._tokenizer.encode_text(text)) for text in _variants(word)]
        except InvalidParameter as error:
            raise InvalidParameter("bad_words", error.message) from error
        if not any(variants):
            raise InvalidParameter("bad_words", f"{word!r:.40} has no tokens")
        return [ids for ids in variants if ids]

    def _check_ids(self, name: str, token_ids: Iterable[object]) -> None:
        ids: list[Any] = list(token_ids)
        # Fast path for the whole list: prompts and lists of allowed ids are long and almost always valid.
        is_plain = set(map(type, ids)) <= {int}
        if is_plain and min(ids, default=0) >= 0 and max(ids, default=0) < self._vocab_size:
            return
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(
                    name, f"token id {excerpt(token_id)} is outside the vocabulary of {self._vocab_size}"
                )


class TextEncoder(Protocol):
    """The part of a tokenizer that `prepare_texts` uses."""

    def encode_text(self, text: str) -> list[int]: ...


def prepare_texts(tokenizer: TextEncoder, params: SamplingParams) -> None:
    """Encode the texts in `params` outside the engine's thread.

    The tokenizer and the automaton cache the results for `InputProcessor.resolve`. Raises any exception of
    the tokenizer.
    """
    for word in params.bad_words:
        for text in _variants(word):
            tokenizer.encode_text(text)
    if params.stop:
        automaton_of(params.stop)


def _variants(word: str) -> tuple[str, str]:
    """`word` at the start of a text and after a space, as in vLLM's `bad_words`."""
    bare = word.lstrip()
    return bare, f" {bare}"
