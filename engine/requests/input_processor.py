"""Texts in a request's parameters to token ids, once, when the request is added.

Law: whatever names a token that the model does not have is refused, by the field's name. Knows no sequences.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.constraints import Constraints
from engine.errors import InvalidParameter
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Tokenizer
from engine.text.pattern_automaton import automaton_of
from engine.validation import shown


@dataclass(frozen=True, slots=True)
class Resolved:
    """What parameters come to. `end_texts`: of end tokens, the text that they leave all the same."""

    constraints: Constraints
    end_texts: Mapping[int, str] = field(default_factory=dict)


class InputProcessor:
    """Knows the model's vocabulary and ends, and the tokenizer's way with texts."""

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
        """Raises `InvalidParameter` for output tokens that this model cannot have generated."""
        self._check_ids("resumed", token_ids)

    def resolve(self, params: SamplingParams) -> Resolved:
        """Raises `InvalidParameter` where a text comes to no tokens."""
        stops = {self._tokenizer.special_token_id(stop): stop for stop in params.stop}
        special_stops = {token_id: stop for token_id, stop in stops.items() if token_id is not None}
        ends = {*params.stop_token_ids, *special_stops}
        constraints = Constraints(
            end_token_ids=frozenset(ends if params.ignore_eos else ends | self._eos_token_ids),
            bad_token_ids=tuple(dict.fromkeys(ids for word in params.bad_words for ids in self._spell(word))),
        )
        return Resolved(constraints, special_stops if params.include_stop_str_in_output else {})

    def _spell(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of `word` at the beginning of a text and after a space.

        Both count, however many tokens they take: a tokenizer may have a token for the word with its space
        alone.
        """
        try:
            spelled = [tuple(self._tokenizer.encode_text(text)) for text in _spellings(word)]
        except InvalidParameter as error:
            raise InvalidParameter("bad_words", error.message) from error
        if not any(spelled):
            raise InvalidParameter("bad_words", f"{word!r:.40} has no tokens")
        return [ids for ids in spelled if ids]

    def _check_ids(self, name: str, token_ids: Iterable[object]) -> None:
        ids: list[Any] = list(token_ids)
        # All at once first: prompts and lists of allowed ids are long, and almost always right.
        is_plain = set(map(type, ids)) <= {int}
        if is_plain and min(ids, default=0) >= 0 and max(ids, default=0) < self._vocab_size:
            return
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(
                    name, f"token id {shown(token_id)} is outside the vocabulary of {self._vocab_size}"
                )


def params_of_output(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of output `index`: a seed of its own, and no logprobs of the prompt.

    The seed of index 0 is the request's, so that it is the text of the same request with n of 1. Which output
    computes the prompt, and with it the logprobs, is seen later: `Request.choose_head`.
    """
    if index == 0:
        seed = params.seed
    else:
        digest = hashlib.sha256(f"{params.seed % 2**64}:{index}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big")
    return params.for_output(seed=seed, prompt_logprobs=None)


class TextEncoder(Protocol):
    """What `prepare_texts` needs of a model's tokenizer."""

    def encode_text(self, text: str) -> list[int]: ...


def prepare_texts(tokenizer: TextEncoder, params: SamplingParams) -> None:
    """Do ahead, in another thread than the step loop's, what texts in `params` cost when they are resolved.

    Tokenizer and automaton keep the result for a moment. Raises what the tokenizer raises.
    """
    for word in params.bad_words:
        for text in _spellings(word):
            tokenizer.encode_text(text)
    if params.stop:
        automaton_of(params.stop)


def _spellings(word: str) -> tuple[str, str]:
    """`word` at the beginning of a text and after a space, as in vLLM's `bad_words`."""
    bare = word.lstrip()
    return bare, f" {bare}"
