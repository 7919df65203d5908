"""A common interface to the grammar libraries."""

import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Matcher(Protocol):
    def fill(self) -> np.ndarray[Any, Any]: ...
    def accept(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...


class Library(Protocol):
    name: str
    packages: tuple[str, ...]
    eos: int

    def compile(self, kind: str, grammar: str) -> Callable[[], Matcher]: ...


class Llguidance:
    name = "llguidance"
    packages: tuple[str, ...] = ("llguidance",)

    def __init__(self, tokens: list[bytes]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        class Tokens:
            bos_token_id = None
            special_token_ids: tuple[int, ...] = ()
            eos_token_id = len(tokens) - 1

            def __call__(self, _: object) -> list[int]:
                return []

        self.eos = len(tokens) - 1
        wrapped = Tokens()
        wrapped.tokens = tokens  # type: ignore[attr-defined]  # the library reads it
        self._tokenizer = LLTokenizer(TokenizerWrapper(wrapped))

    def compile(self, kind: str, grammar: str) -> Callable[[], Matcher]:
        from llguidance import LLMatcher, LLParserLimits, regex_to_lark
        from llguidance.gbnf_to_lark import gbnf_to_lark

        lark = {
            "json": lambda: f"start: %json {grammar}",
            "regex": lambda: f"start: /{regex_to_lark(grammar, 'dw')}/",
            "choice": lambda: "start: " + " | ".join(map(json.dumps, json.loads(grammar))),
            "ebnf": lambda: gbnf_to_lark(grammar),
        }[kind]()
        lark += '\n%llguidance {"no_forcing": true}\n'
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: _LlguidanceMatcher(matcher.deep_copy(), self._tokenizer.vocab_size)


class _LlguidanceMatcher:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._row = np.zeros((vocab_size + 31) // 32, np.int32)

    def fill(self) -> np.ndarray[Any, Any]:
        self._matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        return self._row

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


class Xgrammar:
    name = "xgrammar"
    packages: tuple[str, ...] = ("xgrammar", "apache-tvm-ffi")

    def __init__(self, tokens: list[bytes]) -> None:
        from xgrammar import GrammarCompiler, TokenizerInfo

        info = TokenizerInfo(tokens, stop_token_ids=[len(tokens) - 1])
        self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = len(tokens)
        self.eos = len(tokens) - 1

    def compile(self, kind: str, grammar: str) -> Callable[[], Matcher]:
        compiled = {
            "json": lambda: self._compiler.compile_json_schema(grammar, strict_mode=False),
            "regex": lambda: self._compiler.compile_regex(grammar),
            "choice": lambda: self._compiler.compile_grammar(
                "root ::= " + " | ".join(map(json.dumps, json.loads(grammar)))
            ),
            "ebnf": lambda: self._compiler.compile_grammar(grammar),
        }[kind]()
        return lambda: _XgrammarMatcher(compiled, self._vocab_size)


class _XgrammarMatcher:
    def __init__(self, compiled: Any, vocab_size: int) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled)
        self._row = np.zeros((1, (vocab_size + 31) // 32), np.int32)
        self._eos = vocab_size - 1

    def fill(self) -> np.ndarray[Any, Any]:
        # False: everything is allowed, and the row does not change.
        if not self._matcher.fill_next_token_bitmask(self._row):
            self._row[:] = -1
        row: np.ndarray[Any, Any] = self._row[0]
        return row

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def may_end(self) -> bool:
        return has(self.fill(), self._eos)


def has(row: np.ndarray[Any, Any], token_id: int) -> bool:
    return bool(row[token_id // 32] >> (token_id % 32) & 1)


def installed(tokens: list[bytes]) -> list[Library]:
    found: list[Library] = []
    for make in (Llguidance, Xgrammar):
        try:
            found.append(make(tokens))
        except ImportError:
            print(f"{make.name} is not installed")
    return found
