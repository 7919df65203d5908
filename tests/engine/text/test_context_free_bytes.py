"""The concatenated bytes of tokens are the text that the tokenizer decodes."""

import os.path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.execution.text.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from engine.text.byte_decoder import ByteDecoder
from engine.text.detokenizer import Detokenizer, IncrementalDecoder
from engine.text.token_bytes import context_free_bytes
from tests.tiny_models import VOCAB_SIZE, make_tokenizer


def make_words() -> PreTrainedTokenizerFast:
    """Words joined by spaces, as without a decoder."""
    words = Backend(
        models.WordLevel({word: n for n, word in enumerate(["<s>", "a", "", "é\ufffd", "b c"])}, "a")
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")


def with_tools(fast: PreTrainedTokenizerFast) -> Tokenizer:
    fast.add_tokens(["<tool é>", "<toolé>", AddedToken("<silent>", special=True)])
    return Tokenizer(fast)


BYTES, WORDS = with_tools(make_tokenizer()), with_tools(make_words())
CASES = {"bytes": (BYTES, VOCAB_SIZE + 4), "words": (WORDS, 9)}


def decode_all(decoder: ByteDecoder | IncrementalDecoder, output: list[int]) -> str:
    return "".join(map(decoder.push, output)) + decoder.close()


def byte_decoder(tokenizer: Tokenizer, prompt: list[int], *, skips: bool = True) -> ByteDecoder:
    token_bytes = tokenizer.decoded_bytes(skips)
    assert token_bytes is not None
    return ByteDecoder(token_bytes, prompt)


@pytest.mark.parametrize("kind", CASES)
@given(data=st.data(), skips=st.booleans())
def test_joined_bytes_are_the_decoded_text(kind: str, data: st.DataObject, skips: bool) -> None:
    tokenizer, size = CASES[kind]
    # Draws more parts of characters and special tokens, which are rare in the vocabulary.
    token_ids = st.lists(
        st.integers(0, size - 1) | st.sampled_from([0, 1, size - 2, size - 3, 165, 121, 249])
    )
    prompt, output = data.draw(token_ids.filter(bool)), data.draw(token_ids)
    if kind == "words":
        prompt, output = [one % size for one in prompt], [one % size for one in output]
    whole, before = tokenizer.decode(prompt + output, skips), tokenizer.decode(prompt, skips)

    text = decode_all(byte_decoder(tokenizer, prompt, skips=skips), output)

    assert text == whole[len(os.path.commonprefix([whole, before])) :]  # noqa: RUF071 - of characters
    window = IncrementalDecoder(lambda ids: tokenizer.decode(ids, skips), prompt)
    assert text == decode_all(window, output)


@given(st.text(), st.text(min_size=1))
def test_characters_are_never_split(prompt: str, text: str) -> None:
    decoder = byte_decoder(BYTES, BYTES.encode_text(f"a{prompt}"))
    pieces = [decoder.push(one) for one in BYTES.encode_text(text)]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
    assert decoder.close() == ""


def test_cached_texts_of_tokens_do_not_depend_on_their_first_context() -> None:
    """The cache is shared by all decoders."""
    first, *rest = BYTES.encode_text("世")
    letter = BYTES.encode_text("a")[0]
    for _ in range(2):
        assert decode_all(byte_decoder(BYTES, [letter]), [first, *rest, letter]) == "世a"
        assert decode_all(byte_decoder(BYTES, [letter]), [first, letter]) == "\ufffda"
        assert decode_all(byte_decoder(BYTES, [letter, first]), [letter]) == "a"
        assert decode_all(byte_decoder(BYTES, [letter, first]), [*rest, letter]) == "世a"
        assert decode_all(byte_decoder(BYTES, [letter, first, rest[0]]), [rest[1], letter]) == "世a"
        assert decode_all(byte_decoder(WORDS, [1]), [1, 1]) == " a a"
        assert decode_all(byte_decoder(WORDS, [0]), [1, 1]) == "a a"
        assert decode_all(byte_decoder(WORDS, [0], skips=False), [0, 1]) == " <s> a"


def test_a_token_that_raises_leaves_the_state_unchanged() -> None:
    first, *rest = BYTES.encode_text("世")
    decoder = byte_decoder(BYTES, [first])
    with pytest.raises(OverflowError):
        decoder.push(-1)
    assert decode_all(decoder, rest) == "世"


def test_a_detokenizer_skips_special_tokens_by_its_parameters() -> None:
    for skips, text in ((True, ""), (False, "</s>")):
        stream = Detokenizer(BYTES, [5], SamplingParams(skip_special_tokens=skips))
        assert stream.push(1) == text


def fast(backend: Backend, decoder: decoders.Decoder | None) -> Tokenizer:
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_a_decoder_that_depends_on_neighbours_has_no_token_bytes(decoder: decoders.Decoder) -> None:
    tokenizer = fast(Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[])), decoder)
    assert tokenizer.decoded_bytes() is None


class Disagreeing:
    """A tokenizer of a known kind that decodes one token differently."""

    def __init__(self, backend: Any, odd: int) -> None:
        self._backend = backend
        self._odd = odd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, token_ids: list[int], skips: bool) -> str:
        return str(self._backend.decode([one for one in token_ids if one != self._odd], skips))


@pytest.mark.parametrize("odd", [7, VOCAB_SIZE])
def test_a_tokenizer_that_disagrees_has_no_token_bytes(odd: int) -> None:
    backend = make_tokenizer()
    backend.add_tokens(["<tool é>"])
    added, inner = {VOCAB_SIZE}, backend.backend_tokenizer
    assert context_free_bytes(inner, added, frozenset(), skips=False) is not None
    assert context_free_bytes(Disagreeing(inner, odd), added, frozenset(), skips=False) is None
