"""Grammars by the library llguidance, over the bytes of a model's tokens.

Law: what the mask allows is decided by bytes alone: any spelling of an allowed text in tokens is allowed, a
special token never, the end exactly where the text may end. So a grammar's place depends on the output's
tokens and nothing else. The library's limits bound the work of every step. Knows no sequences.
"""

import threading
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine.errors import InvalidParameter
from engine.execution.text.grammar_sandbox import LIMITS, GrammarSandbox
from engine.execution.text.lark import explain, to_lark
from engine.execution.text.tokenizer import Tokenizer
from engine.requests.grammar_compiler import GrammarFactory
from engine.structured_outputs import FIELD, StructuredOutputs

TRIAL_SECONDS = 5.0
"""The most of a processor's time that a grammar may take to compile, off the step loop."""

Words = NDArray[np.int32]
"""A bit for each token: bit `i % 32` of word `i // 32`."""


class LlguidanceBackend:
    """Compiles for one tokenizer and a model of `vocab_size` tokens, of which `eos_token_ids` end a text.

    The vocabulary is read by `load`, or else for the first grammar (a quarter of a second for 50,000 tokens).
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(one for one in eos_token_ids if one < vocab_size)
        self._sandbox = GrammarSandbox(TRIAL_SECONDS)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None

    def check(self) -> None:
        """Raises `InvalidParameter` if no grammar can be served with this tokenizer."""
        if not self._tokenizer.knows_bytes:
            raise InvalidParameter(
                FIELD, "this model's tokenizer does not tell the bytes of its tokens, which grammars need"
            )

    def compile(self, structured_outputs: StructuredOutputs) -> GrammarFactory:
        """Raises `ValueError`, with what is wrong in the user's own words."""
        self.check()
        lark = to_lark(structured_outputs)
        if error := self._sandbox.error_of(lark):
            raise ValueError(explain(error, structured_outputs))
        vocabulary = self._load_once()
        matcher = LLMatcher(vocabulary.library, lark, log_level=0, limits=LIMITS)
        first = TokenGrammar(matcher, vocabulary)
        # Finds a grammar without any text, and spares every output of it this first, costly mask.
        first.fill_bitmask(np.zeros(_num_words(self._vocab_size), np.int32))

        def fresh() -> TokenGrammar:
            return TokenGrammar(matcher.deep_copy(), vocabulary)

        return fresh

    def load(self) -> None:
        """Read the vocabulary now, so that no step waits for it later: the library holds the interpreter."""
        self._load_once()

    def _load_once(self) -> "_Vocabulary":
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


class TokenGrammar:
    """A place in a grammar (`engine.constraints.Grammar`). Tokens that end the text are passed over.

    Every method raises `ValueError` once the library has given up: the text left the grammar, or the grammar
    is too costly to follow further.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: "_Vocabulary") -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_seen = 0
        self._mask: Words | None = None

    def advance(self, token_ids: list[int]) -> None:
        if len(token_ids) < self._num_seen:
            raise ValueError("a grammar does not go back")
        new = token_ids[self._num_seen :]
        self._num_seen = len(token_ids)
        text = [token_id for token_id in new if token_id not in self._vocabulary.eos_token_ids]
        if text:
            self._mask = None
            self._matcher.consume_tokens(text)
        self._check()

    def fill_bitmask(self, row: Words) -> None:
        mask = self._current_mask()
        if not mask.any() and not self._matcher.is_accepting():
            raise ValueError("the grammar leads to a place from where no text goes on")
        row[:] = mask

    @property
    def is_complete(self) -> bool:
        if not self._matcher.is_accepting():
            self._check()
            return False
        return not (self._current_mask() & ~self._vocabulary.eos).any()

    def _current_mask(self) -> Words:
        if self._mask is None:
            mask = self._vocabulary.new_mask()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
            # The library's own idea of special tokens and of ends is narrower than the model's.
            mask = mask[: len(self._vocabulary.text)] & self._vocabulary.text
            if self._matcher.is_accepting():
                mask |= self._vocabulary.eos
            self._mask = mask
        return self._mask

    def _check(self) -> None:
        # The library says "stopped", and allows the end, also where it has failed.
        if self._matcher.is_error():
            raise ValueError(explain(self._matcher.get_error()))


class _Vocabulary:
    """A model's tokens as the library wants them, and which of them are text, which the end.

    The library is told no special token, so that no grammar can name one. Ids that are special, or that the
    tokenizer does not have, are tokens without bytes to it, which it never allows.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        hidden = tokenizer.special_ids | eos_token_ids
        tokens = [b"" if one in hidden else tokenizer.token_bytes(one) for one in range(vocab_size)]
        self.text = _words(vocab_size, [one for one, spelt in enumerate(tokens) if spelt])
        self.eos = _words(vocab_size, sorted(eos_token_ids))
        # The library needs one end: an id of its own, behind the model's.
        wrapper = TokenizerWrapper(_Tokens([*tokens, b""], vocab_size))
        self.library = LLTokenizer(wrapper, eos_token=vocab_size)
        self._num_words = _num_words(self.library.vocab_size)

    def new_mask(self) -> Words:
        """Room for the library's mask, which may be a word longer than the model's."""
        return np.zeros(self._num_words, np.int32)


class _Tokens:
    """The protocol of `TokenizerWrapper`. No text is ever encoded: the grammars force no tokens."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, _: Any) -> list[int]:
        return []


def _num_words(num_bits: int) -> int:
    return (num_bits + 31) // 32


def _words(vocab_size: int, token_ids: list[int]) -> Words:
    bits = np.zeros(_num_words(vocab_size) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
