"""Texts that a grammar allows: drawn token by token through its masks, and checked without the library.

Texts are checked with `json`, `jsonschema`, `re` and `in`, independently of the mask's library.
"""

import json
import re

import jsonschema
import numpy as np

from engine.constraints import Grammar
from engine.execution.text.llguidance_backend import LlguidanceBackend
from engine.execution.text.tokenizer import Tokenizer
from engine.requests.grammar_compiler import GrammarCompilerPool
from engine.structured_outputs import StructuredOutputs


def compiler_of(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]
) -> GrammarCompilerPool:
    """A grammar compiler with a real tokenizer."""
    return GrammarCompilerPool(
        LlguidanceBackend(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids), timeout_seconds=60.0
    )


def check_text(structured_outputs: StructuredOutputs, text: str) -> None:
    """Fail if a whole text is not valid; `grammar` is not checked."""
    match structured_outputs.kind:
        case "json":
            jsonschema.validate(json.loads(text), json.loads(structured_outputs.json_schema))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert structured_outputs.regex is not None
            assert re.fullmatch(structured_outputs.regex, text, re.ASCII)
        case "choice":
            assert structured_outputs.choice is not None
            assert text in structured_outputs.choice


def allowed_ids(row: np.ndarray) -> list[int]:
    """The ids whose bits are set."""
    return [int(one) for one in np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]]


def draw(
    grammar: Grammar,
    random: np.random.Generator,
    *,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    favoured: frozenset[int] = frozenset(),
    max_tokens: int = 600,
) -> list[int] | None:
    """Output tokens of random logits through the mask, as a sampler would; None if it does not end in time.

    `favoured` ids, such as closing quotes and brackets, are more likely, so that texts end.
    """
    output: list[int] = []
    row = np.zeros((vocab_size + 31) // 32, np.int32)
    bias = np.zeros(len(row) * 32)
    bias[list(favoured)] = 3.0
    while len(output) < max_tokens:
        grammar.advance(output)
        grammar.fill_bitmask(row)
        ids = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]
        assert grammar.is_complete == (len(ids) <= len(eos_token_ids) and set(ids) <= eos_token_ids)
        token_id = int(ids[np.argmax(random.standard_normal(len(ids)) + bias[ids])])
        if token_id in eos_token_ids:
            return output
        output.append(token_id)
    return None
