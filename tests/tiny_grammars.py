"""One constraint of each kind, and tokenizers of a few hundred tokens with grammars over them.

Small enough to draw hundreds of texts; characters span several tokens.
"""

from typing import Any

import numpy as np

from engine.execution.text.llguidance_backend import LlguidanceBackend, TokenGrammar
from engine.execution.text.tokenizer import Tokenizer
from engine.requests.grammar_compiler import GrammarFactory
from engine.structured_outputs import StructuredOutputs
from tests.grammar_checks import allowed_ids, draw
from tests.tiny_models import EOS, IM_END, VOCAB_SIZE, make_tokenizer
from tests.tiny_tokenizers import make_sentencepiece

PADDED = VOCAB_SIZE + 45
"""A model's vocabulary is larger than its tokenizer's, and no multiple of 32."""
EOS_IDS = frozenset({EOS, IM_END})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
        "shape": {"anyOf": [{"const": None}, {"$ref": "#/$defs/shape"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"shape": {"type": "object", "properties": {"side": {"type": "boolean"}}, "required": ["side"]}},
}
KINDS = {
    "json": StructuredOutputs(json=PERSON),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"^(\d{1,3}-[a-f]+x?|[^a-z\d]{2,4})$"),
    "choice": StructuredOutputs(choice=("yes", "no", "not sure", "née 世👋", 'a "quoted\\ one"\n\0', "</s>")),
    "grammar": StructuredOutputs(grammar='root ::= "<" item{1,4} ">"\nitem ::= [0-9]{1,6} "," | "é"'),
}


class Tiny:
    """A tokenizer and its grammar backend."""

    def __init__(self, fast: Any, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = Tokenizer(fast)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = self.tokenizer.vocab_size + 45
        self.backend = LlguidanceBackend(
            self.tokenizer, vocab_size=self.vocab_size, eos_token_ids=eos_token_ids
        )
        token_bytes = [self.tokenizer.token_bytes(one) for one in range(self.tokenizer.vocab_size)]
        self.closing = (
            frozenset(i for i, one in enumerate(token_bytes) if one and one in b'"}]>') | eos_token_ids
        )
        self.factories: dict[str, GrammarFactory] = {}

    def fresh(self, kind: str) -> TokenGrammar:
        if kind not in self.factories:
            self.factories[kind] = self.backend.compile(KINDS[kind])
        grammar = self.factories[kind]()
        assert isinstance(grammar, TokenGrammar)
        return grammar

    def draw(self, kind: str, seed: int) -> list[int] | None:
        return draw(
            self.fresh(kind),
            np.random.default_rng(seed),
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            favoured=self.closing,
        )

    def row(self, grammar: TokenGrammar) -> np.ndarray:
        row = np.full((self.vocab_size + 31) // 32, -1, np.int32)
        grammar.fill_bitmask(row)
        return row

    def mask(self, structured_outputs: StructuredOutputs, text: str = "") -> set[int]:
        """The ids that may follow `text`."""
        grammar = self.backend.compile(structured_outputs)()
        assert isinstance(grammar, TokenGrammar)
        start = self.tokenizer.encode("a")
        token_ids = self.tokenizer.encode("a" + text)
        assert token_ids[: len(start)] == start
        grammar.advance(token_ids[len(start) :])
        return set(allowed_ids(self.row(grammar)))


BYTE_LEVEL = Tiny(make_tokenizer(), EOS_IDS)
SENTENCEPIECE = Tiny(make_sentencepiece(), frozenset({2}))


def bytes_to_ids(text: str) -> list[int]:
    """One token per byte."""
    tokenizer = BYTE_LEVEL.tokenizer
    ids = {tokenizer.token_bytes(one): one for one in range(tokenizer.vocab_size)}
    return [ids[bytes([byte])] for byte in text.encode()]
