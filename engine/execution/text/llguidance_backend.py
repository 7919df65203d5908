"""The grammar backend: masks of allowed tokens by llguidance, over the bytes of a model's tokens.

Invariants: any tokenization of an allowed text is allowed, special tokens never, end-of-text tokens exactly
where the text may end. The state of a grammar depends on the output's tokens only. The library's limits bound
the work of every step.
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

MAX_COMPILE_SECONDS = 5.0
"""CPU time that a grammar may take to compile, off the step loop."""

Bitmask = NDArray[np.int32]
"""One bit per token: bit `i % 32` of word `i // 32`."""


class LlguidanceBackend:
    """Compiles grammars for one tokenizer and a model of `vocab_size` tokens.

    `load` reads the vocabulary, or else the first grammar does (0.25 s for 50,000 tokens).
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(one for one in eos_token_ids if one < vocab_size)
        self._sandbox = GrammarSandbox(MAX_COMPILE_SECONDS)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None

    def check(self) -> None:
        """Raise `InvalidParameter` if this tokenizer supports no grammars."""
        if not self._tokenizer.knows_bytes:
            raise InvalidParameter(
                FIELD, "grammars need the bytes of tokens, which this model's tokenizer does not provide"
            )

    def compile(self, structured_outputs: StructuredOutputs) -> GrammarFactory:
        """Raises `ValueError` with an explanation for the user."""
        self.check()
        lark = to_lark(structured_outputs)
        if error := self._sandbox.error_of(lark):
            raise ValueError(explain(error, structured_outputs))
        vocabulary = self.load()
        matcher = LLMatcher(vocabulary.library, lark, log_level=0, limits=LIMITS)
        first = TokenGrammar(matcher, vocabulary)
        # Detects a grammar that allows no text, and computes the costly first mask once for all outputs.
        first.fill_bitmask(np.zeros(_num_words(self._vocab_size), np.int32))

        def new_grammar() -> TokenGrammar:
            return TokenGrammar(matcher.deep_copy(), vocabulary)

        return new_grammar

    def load(self) -> "_Vocabulary":
        """Read the vocabulary before steps run: the library holds the interpreter lock meanwhile."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


class TokenGrammar:
    """The state of one output in a grammar (`engine.constraints.Grammar`). End-of-text tokens are skipped.

    Every method raises `ValueError` once the text has left the grammar, or the grammar has become too costly.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: "_Vocabulary") -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_seen = 0
        self._mask: Bitmask | None = None

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

    def fill_bitmask(self, row: Bitmask) -> None:
        mask = self._current_mask()
        if not mask.any() and not self._matcher.is_accepting():
            raise ValueError("the grammar reached a state from which no text is allowed")
        row[:] = mask

    @property
    def is_complete(self) -> bool:
        if not self._matcher.is_accepting():
            self._check()
            return False
        return not (self._current_mask() & ~self._vocabulary.eos).any()

    def _current_mask(self) -> Bitmask:
        if self._mask is None:
            mask = self._vocabulary.new_mask()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
            # The library does not know the model's special tokens and end-of-text tokens.
            mask = mask[: len(self._vocabulary.text)] & self._vocabulary.text
            if self._matcher.is_accepting():
                mask |= self._vocabulary.eos
            self._mask = mask
        return self._mask

    def _check(self) -> None:
        # After a failure the library still reports "stopped" and allows the end.
        if self._matcher.is_error():
            raise ValueError(explain(self._matcher.get_error()))


class _Vocabulary:
    """A model's tokens for the library, with bitmasks of those that are text and those that end it.

    Special ids, and ids that the tokenizer does not have, are tokens without bytes, which the library never
    allows and no grammar can name.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        hidden = tokenizer.special_ids | eos_token_ids
        tokens = [b"" if one in hidden else tokenizer.token_bytes(one) for one in range(vocab_size)]
        self.text = _bitmask(vocab_size, [one for one, token in enumerate(tokens) if token])
        self.eos = _bitmask(vocab_size, sorted(eos_token_ids))
        # The library needs one end-of-text id: an extra one after the model's.
        wrapper = TokenizerWrapper(_Tokens([*tokens, b""], vocab_size))
        self.library = LLTokenizer(wrapper, eos_token=vocab_size)
        self._num_words = _num_words(self.library.vocab_size)

    def new_mask(self) -> Bitmask:
        """A buffer for the library's mask, which may be a word longer than the model's."""
        return np.zeros(self._num_words, np.int32)


class _Tokens:
    """The protocol of `TokenizerWrapper`. It encodes nothing, since the grammars force no tokens."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, _: Any) -> list[int]:
        return []


def _num_words(num_bits: int) -> int:
    return (num_bits + 31) // 32


def _bitmask(vocab_size: int, token_ids: list[int]) -> Bitmask:
    bits = np.zeros(_num_words(vocab_size) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
