"""Grammars over real tokenizers: every text that the masks allow is valid."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.execution.text.llguidance_backend import LlguidanceBackend, TokenGrammar
from engine.execution.text.tokenizer import Tokenizer
from engine.structured_outputs import StructuredOutputs
from tests.grammar_checks import allowed_ids, check_text, compiler_of, draw
from tests.tiny_grammars import BYTE_LEVEL, EOS_IDS, KINDS, PADDED, PERSON, SENTENCEPIECE, Tiny, bytes_to_ids
from tests.tiny_models import EOS, IM_END, IM_START, VOCAB_SIZE

NUM_TEXTS = 200
TINY = pytest.mark.parametrize("tiny", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])


@TINY
@pytest.mark.parametrize("kind", KINDS)
def test_every_allowed_text_is_valid(tiny: Tiny, kind: str) -> None:
    """Also with characters of several tokens, which a mask of whole characters would never complete."""
    texts = []
    for seed in range(NUM_TEXTS):
        output = tiny.draw(kind, seed)
        if output is not None:
            # A token before it, so that SentencePiece's first space is not stripped.
            text = tiny.tokenizer.decode([tiny.tokenizer.encode("a")[-1], *output], False).removeprefix("a")
            check_text(KINDS[kind], text)
            assert "\N{REPLACEMENT CHARACTER}" not in text
            texts.append(text)
    assert len(texts) >= NUM_TEXTS * 0.9
    assert len(set(texts)) >= 5
    assert kind == "json_object" or any(not text.isascii() for text in texts)


@settings(max_examples=40)
@given(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]), st.sampled_from(sorted(KINDS)), st.integers(0, 10**6))
def test_a_replay_reaches_the_same_state(tiny: Tiny, kind: str, seed: int) -> None:
    """At every position of the text, for any number of tokens at once."""
    output = (tiny.draw(kind, seed) or [])[:60]
    undisturbed = tiny.fresh(kind)
    for split in range(len(output) + 1):
        undisturbed.advance(output[:split])
        replayed = tiny.fresh(kind)
        replayed.advance(output[:split])
        assert np.array_equal(tiny.row(undisturbed), tiny.row(replayed))
        assert undisturbed.is_complete == replayed.is_complete


@settings(max_examples=60)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8))
def test_any_text_can_be_a_choice(choices: list[str]) -> None:
    grammar = BYTE_LEVEL.backend.compile(StructuredOutputs(choice=tuple(choices)))()
    for text in choices:
        one = BYTE_LEVEL.backend.compile(StructuredOutputs(choice=tuple(choices)))()
        one.advance(bytes_to_ids(text))
        row = np.zeros((BYTE_LEVEL.vocab_size + 31) // 32, np.int32)
        one.fill_bitmask(row)
        assert set(allowed_ids(row)) >= EOS_IDS
    assert not grammar.is_complete


def test_the_end_is_allowed_exactly_where_the_text_may_end() -> None:
    numbers = StructuredOutputs(regex="[0-9]{2,3}")
    assert not BYTE_LEVEL.mask(numbers, "1") & EOS_IDS
    assert BYTE_LEVEL.mask(numbers, "12") > EOS_IDS
    assert BYTE_LEVEL.mask(numbers, "123") == EOS_IDS


def test_no_special_token_is_ever_allowed() -> None:
    """Neither by a grammar that allows any text, nor by one that names the id."""
    specials = BYTE_LEVEL.tokenizer.special_ids
    anything = BYTE_LEVEL.mask(StructuredOutputs(regex=r"(?s:.*)"))
    assert anything & specials == EOS_IDS
    assert not any(one >= VOCAB_SIZE for one in anything), "ids that only the model knows"
    numbered = StructuredOutputs(grammar=f'start: "a" | <[{IM_START}]>')
    assert not BYTE_LEVEL.mask(numbered) & specials
    for grammar in (f"start: <[{IM_START}]>", "start: <|im_start|>"):
        with pytest.raises(ValueError, match=r"no text|special token"):
            BYTE_LEVEL.backend.compile(StructuredOutputs(grammar=grammar))


def test_any_tokenization_of_an_allowed_text_is_allowed() -> None:
    """The model chooses the tokens, not the tokenizer."""
    grammar = BYTE_LEVEL.backend.compile(StructuredOutputs(choice=("the quick brown fox",)))
    for token_ids in (
        bytes_to_ids("the quick brown fox"),
        BYTE_LEVEL.tokenizer.encode("the quick brown fox")[1:],
    ):
        one = grammar()
        one.advance(token_ids)
        assert one.is_complete
    assert len(bytes_to_ids("the quick brown fox")) > len(token_ids)


def test_end_tokens_are_skipped() -> None:
    """A request that ignores the end continues in the same state."""
    grammar = BYTE_LEVEL.backend.compile(StructuredOutputs(regex="(ab)+"))()
    grammar.advance([*bytes_to_ids("ab"), EOS, IM_END])
    assert not grammar.is_complete
    grammar.advance([*bytes_to_ids("ab"), EOS, IM_END, *bytes_to_ids("ab")])
    with pytest.raises(ValueError, match="does not go back"):
        grammar.advance([])


def test_a_complete_grammar_still_allows_the_end() -> None:
    """With `min_tokens`, the sampler must see that nothing else is allowed."""
    grammar = BYTE_LEVEL.backend.compile(KINDS["choice"])()
    assert not grammar.is_complete
    grammar.advance(bytes_to_ids("yes"))
    assert grammar.is_complete
    assert isinstance(grammar, TokenGrammar)
    assert set(allowed_ids(BYTE_LEVEL.row(grammar))) == EOS_IDS


def test_a_token_outside_the_grammar_is_a_permanent_error() -> None:
    grammar = BYTE_LEVEL.backend.compile(KINDS["choice"])()
    for _ in range(2):
        with pytest.raises(ValueError, match="satisfy the grammar"):
            grammar.advance(bytes_to_ids("x"))
    with pytest.raises(ValueError, match="satisfy the grammar"):
        assert grammar.is_complete
    with pytest.raises(ValueError, match="satisfy the grammar"):
        grammar.fill_bitmask(np.zeros((BYTE_LEVEL.vocab_size + 31) // 32, np.int32))


def test_outputs_of_one_request_have_their_own_states() -> None:
    factory = BYTE_LEVEL.backend.compile(KINDS["choice"])
    first, second = factory(), factory()
    first.advance(bytes_to_ids("yes"))
    assert first.is_complete
    assert not second.is_complete


def test_a_model_without_end_tokens_can_complete_a_text() -> None:
    backend = LlguidanceBackend(BYTE_LEVEL.tokenizer, vocab_size=PADDED, eos_token_ids=frozenset())
    grammar = backend.compile(KINDS["choice"])()
    grammar.advance(bytes_to_ids("yes"))
    assert grammar.is_complete
    row = np.zeros((PADDED + 31) // 32, np.int32)
    grammar.fill_bitmask(row)
    assert not row.any()


def test_a_vocabulary_of_a_whole_number_of_words() -> None:
    """The library's own end id is the first bit of a word that the model's row does not have."""
    backend = LlguidanceBackend(BYTE_LEVEL.tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)
    backend.load()
    assert VOCAB_SIZE % 32 == 0
    grammar = backend.compile(KINDS["choice"])()
    row = np.zeros(VOCAB_SIZE // 32, np.int32)
    grammar.fill_bitmask(row)
    assert row.any()


def test_whitespace_between_parts_of_json_is_bounded() -> None:
    """OpenAI's guide to JSON mode warns of endless whitespace."""
    schema = StructuredOutputs(json={"type": "array"})
    assert {len(one) for one in map(BYTE_LEVEL.tokenizer.token_bytes, BYTE_LEVEL.mask(schema, "["))} >= {1}
    space = bytes_to_ids(" ")[0]
    assert space in BYTE_LEVEL.mask(schema, "[" + " " * 63)
    assert space not in BYTE_LEVEL.mask(schema, "[" + " " * 64)


def test_escapes_of_any_character_are_allowed() -> None:
    text = StructuredOutputs(json={"type": "string"})
    assert BYTE_LEVEL.mask(text, r'"\u00e9\ud83d\ude00\n"') == EOS_IDS
    with pytest.raises(ValueError, match="satisfy the grammar"):
        BYTE_LEVEL.mask(text, r'"\ud83d"')


def test_a_step_that_costs_too_much_is_an_error() -> None:
    """The grammar compiles, but a text exceeds the parser's limits."""
    grammar = BYTE_LEVEL.backend.compile(StructuredOutputs(regex="((a{1,1000}){1,1000}){1,1000}"))()
    row = np.zeros((BYTE_LEVEL.vocab_size + 31) // 32, np.int32)

    def write(num_tokens: int) -> None:
        for length in range(num_tokens):
            grammar.advance(bytes_to_ids("a" * length))
            grammar.fill_bitmask(row)

    with pytest.raises(ValueError, match="too large"):
        write(500)


def test_a_tokenizer_without_known_bytes_is_refused() -> None:
    class Old:
        """Without a Rust tokenizer."""

        def __getattr__(self, name: str) -> object:
            if name == "backend_tokenizer":
                raise AttributeError(name)
            return getattr(BYTE_LEVEL.tokenizer._tokenizer, name)

        def __len__(self) -> int:
            return VOCAB_SIZE

    compiler = compiler_of(Tokenizer(Old()), vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)
    with pytest.raises(InvalidParameter, match=r"structured_outputs: .*tokenizer"):
        compiler.submit("r", KINDS["json"])


def test_through_the_compiler() -> None:
    compiler = compiler_of(BYTE_LEVEL.tokenizer, vocab_size=PADDED, eos_token_ids=EOS_IDS)
    compiler.submit("good", KINDS["json"])
    compiler.submit("bad", StructuredOutputs(json={"type": "text"}))
    ready: dict[str, Any] = {}
    while len(ready) < 2:
        compiler.wait(20.0)
        ready.update(compiler.pop_ready())
    assert "Invalid type: text" in ready["bad"]
    random = np.random.default_rng(0)
    for _ in range(2):
        output = draw(
            ready["good"](), random, vocab_size=PADDED, eos_token_ids=EOS_IDS, favoured=BYTE_LEVEL.closing
        )
        assert output is not None
        check_text(KINDS["json"], BYTE_LEVEL.tokenizer.decode(output))


def test_hundreds_of_grammars_leak_nothing() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    properties_of_person: Any = PERSON["properties"]

    def compile_some(start: int) -> None:
        for index in range(start, start + 100):
            properties = {**properties_of_person, f"field_{index}": {"type": "string"}}
            schema = StructuredOutputs(json={**PERSON, "properties": properties})
            BYTE_LEVEL.backend.compile(schema)().advance([])

    compile_some(0)
    before = resident()
    compile_some(100)
    compile_some(200)
    assert resident() - before < 16 << 20
