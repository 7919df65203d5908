"""The concatenated bytes of a text's tokens are the text, in every kind of vocabulary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.execution.text.tokenizer import Tokenizer
from engine.text.token_bytes import byte_characters, piece_bytes_of
from tests.tiny_models import EOS, IM_END, VOCAB_SIZE, make_tokenizer
from tests.tiny_tokenizers import make_sentencepiece

BYTE_LEVEL = Tokenizer(make_tokenizer())
SENTENCEPIECE = Tokenizer(make_sentencepiece())
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])


def joined_bytes(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(one) for one in token_ids if one not in tokenizer.special_ids)


@given(st.text(), st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
def test_the_bytes_of_a_texts_tokens_are_the_text(text: str, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a" + text)
    expected = "a" + text.replace("<s>", "").replace("</s>", "")
    assert joined_bytes(tokenizer, token_ids).decode().endswith(expected)


@TOKENIZERS
def test_parts_of_characters_are_distinct(tokenizer: Tokenizer) -> None:
    """sglang#32290: all tokens that decode to U+FFFD were one candidate."""
    token_ids = [
        one for one in tokenizer.encode("世👋") if tokenizer.decode([one]) == "\N{REPLACEMENT CHARACTER}"
    ]
    assert len(token_ids) == 7
    assert [tokenizer.token_bytes(one) for one in token_ids] == [bytes([byte]) for byte in "世👋".encode()]


@TOKENIZERS
def test_single_bytes_are_distinct(tokenizer: Tokenizer) -> None:
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


def test_ids_that_only_the_model_has_have_no_bytes() -> None:
    assert BYTE_LEVEL.token_bytes(VOCAB_SIZE + 5) == b""


def test_added_tokens_are_text() -> None:
    """Added tokens that are not special, such as names of tools, are stored without byte characters."""
    fast = make_tokenizer()
    fast.add_tokens(["<tool é>"])
    tokenizer = Tokenizer(fast)
    assert tokenizer.token_bytes(VOCAB_SIZE) == "<tool é>".encode()
    assert tokenizer.decode([VOCAB_SIZE]) == "<tool é>"


def test_a_byte_level_piece_outside_the_byte_characters_is_literal() -> None:
    backend = Backend(models.BPE(vocab={"世": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.token_bytes(0) == "世".encode()
    assert tokenizer.decode([0]) == "世"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_an_unknown_decoder_is_reported(decoder: decoders.Decoder | None) -> None:
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


def test_byte_characters_are_those_of_transformers() -> None:
    assert byte_characters() == bytes_to_unicode()


def test_each_character_is_a_byte_or_literal() -> None:
    piece_bytes = piece_bytes_of(make_tokenizer().backend_tokenizer)
    assert piece_bytes is not None
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    for code in range(0x200):
        character = chr(code)
        if character in bytes_of:
            assert piece_bytes(f"a{character}") == bytes([ord("a"), bytes_of[character]])
        else:
            assert piece_bytes(f"a{character}") == f"a{character}".encode()
