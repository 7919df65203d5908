"""The bytes of tokens: one after the other they are the text, however a vocabulary spells them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.execution.text.token_bytes import token_bytes_of
from engine.execution.text.tokenizer import Tokenizer
from tests.tiny_models import EOS, IM_END, VOCAB_SIZE, make_tokenizer
from tests.tiny_tokenizers import make_sentencepiece

BYTE_LEVEL = Tokenizer(make_tokenizer())
SENTENCEPIECE = Tokenizer(make_sentencepiece())
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])


def spelt(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(one) for one in token_ids if one not in tokenizer.special_ids)


@given(st.text(), st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
def test_the_bytes_of_a_texts_tokens_are_the_text(text: str, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a" + text)
    assert spelt(tokenizer, token_ids).decode().endswith("a" + text.replace("<s>", "").replace("</s>", ""))


@TOKENIZERS
def test_parts_of_characters_are_told_apart(tokenizer: Tokenizer) -> None:
    """sglang#32290: tokens that each decode to U+FFFD were one candidate."""
    token_ids = [
        one for one in tokenizer.encode("世👋") if tokenizer.decode([one]) == "\N{REPLACEMENT CHARACTER}"
    ]
    assert len(token_ids) == 7
    assert [tokenizer.token_bytes(one) for one in token_ids] == [bytes([byte]) for byte in "世👋".encode()]


@TOKENIZERS
def test_no_two_tokens_of_one_byte_are_alike(tokenizer: Tokenizer) -> None:
    single = [one for one in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(one)) == 1]
    assert {tokenizer.token_bytes(one) for one in single} == {bytes([byte]) for byte in range(256)}


@TOKENIZERS
def test_all_tokens_decode_to_their_bytes(tokenizer: Tokenizer) -> None:
    start = tokenizer.encode("a")[-1]
    for one in range(tokenizer.vocab_size):
        if one not in tokenizer.special_ids:
            text = tokenizer.token_bytes(one).decode(errors="replace")
            assert tokenizer.decode([start, one]) == tokenizer.decode([start]) + text


def test_special_tokens_are_their_names() -> None:
    assert BYTE_LEVEL.token_bytes(EOS) == b"</s>"
    assert BYTE_LEVEL.token_bytes(IM_END) == b"<|im_end|>"


def test_ids_that_only_the_model_knows_have_no_bytes() -> None:
    assert BYTE_LEVEL.token_bytes(VOCAB_SIZE + 5) == b""


def test_added_tokens_are_text() -> None:
    """Names of tools and the like: added, not special, and not spelt as the vocabulary is."""
    fast = make_tokenizer()
    fast.add_tokens(["<tool é>"])
    tokenizer = Tokenizer(fast)
    assert tokenizer.token_bytes(VOCAB_SIZE) == "<tool é>".encode()
    assert tokenizer.decode([VOCAB_SIZE]) == "<tool é>"


def test_a_byte_level_piece_that_is_not_spelt_in_bytes_stands_for_itself() -> None:
    backend = Backend(models.BPE(vocab={"世": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.token_bytes(0) == "世".encode()
    assert tokenizer.decode([0]) == "世"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_a_decoder_that_is_not_understood_is_said_so(decoder: decoders.Decoder | None) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not tokenizer.knows_bytes
    assert tokenizer.token_bytes(0) == b"a"
    assert BYTE_LEVEL.knows_bytes
    assert SENTENCEPIECE.knows_bytes


def test_metaspace_alone() -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "▁b": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [tokenizer.token_bytes(one) for one in (0, 1)] == [b"a", b" b"]


def test_a_piece_that_is_not_spelt_in_bytes_stands_for_itself() -> None:
    spell = token_bytes_of(make_tokenizer().backend_tokenizer)
    assert spell is not None
    spelt_bytes = {character: byte for byte, character in bytes_to_unicode().items()}
    for code in range(0x200):
        character = chr(code)
        if character in spelt_bytes:
            assert spell(f"a{character}") == bytes([ord("a"), spelt_bytes[character]])
        else:
            assert spell(f"a{character}") == f"a{character}".encode()
