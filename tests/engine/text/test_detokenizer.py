"""Concatenated pieces equal the text, without partial characters, stop strings or lost spaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer, IncrementalDecoder
from engine.text.stop_strings import StopStrings
from tests.engine.fakes import final_text


class ByteTokenizer:
    """Ids 0 to 255 are bytes, as in a byte-level BPE without merges."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def special_token_id(self, text: str) -> None:
        """There are no special tokens."""

    def decoded_bytes(self, skip_special_tokens: bool = True) -> None:
        """Decoded in windows."""


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library with the engine's `decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def byte_level() -> LibraryTokenizer:
    """Byte-level BPE as in GPT-2, without merges: every non-ASCII character takes several ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return LibraryTokenizer(tokenizer)


def metaspace(*words: str) -> LibraryTokenizer:
    """Words with a leading space mark, as in sentencepiece; bytes where no word fits."""
    vocab = [*words, *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return LibraryTokenizer(tokenizer)


def pieces(tokenizer: object, prompt: list[int], output: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer.decode, prompt)  # type: ignore[attr-defined]
    return [*(decoder.push(token_id) for token_id in output), decoder.close()]


def test_a_character_of_several_tokens_is_not_split() -> None:
    """exo#1691, dynamo#12630: decoding token by token returned U+FFFD for emoji and CJK."""
    tokenizer = byte_level()
    text = "ab 世👋 cd"
    output = tokenizer.tokenizer.encode(text).ids

    reported = pieces(tokenizer, [0], output)

    assert all("\ufffd" not in piece for piece in reported)
    assert "".join(reported) == text
    assert "世" in reported
    assert "👋" in reported


@given(st.binary(max_size=60), st.binary(max_size=8))
def test_concatenated_pieces_equal_the_decoded_text(output: bytes, prompt: bytes) -> None:
    """sglang#31598: offsets that moved back repeated characters."""
    prompt = b"p" + prompt + b"."
    reported = pieces(ByteTokenizer(), list(prompt), list(output))

    assert "".join(reported) == output.decode(errors="replace")


@given(st.text(max_size=40))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    reported = pieces(byte_level_shared, [1], byte_level_shared.tokenizer.encode(text).ids)

    assert "".join(reported) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in reported)


byte_level_shared = byte_level()


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_spaces_between_prompt_and_output_and_between_chunks_are_kept(
    output: list[int], prompt: list[int]
) -> None:
    """transformers#22710, vllm#984: a leading space was lost between chunks, or trimmed twice."""
    tokenizer = metaspace("▁", "▁leading", "▁x", "y")

    reported = "".join(pieces(tokenizer, prompt, output))

    assert reported == tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


def test_byte_fallback_characters_are_not_split() -> None:
    tokenizer = metaspace("▁a")
    output = [0, *(1 + byte for byte in "世👋".encode()), 0]

    reported = pieces(tokenizer, [0], output)

    assert "".join(reported) == " a世👋 a"
    assert all("\ufffd" not in piece for piece in reported)


def test_an_endless_run_of_invalid_bytes_is_returned_as_it_arrives() -> None:
    reported = pieces(ByteTokenizer(), list(b"p"), [0xFF] * 50)

    assert "".join(reported) == "\ufffd" * 50
    assert reported.count("") < 10


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    """vllm#48853: prompt text leaked when the prompt ended inside a character."""
    first, *rest = "世".encode()

    reported = "".join(pieces(ByteTokenizer(), [*b"secret ", first], [*rest, *b" x"]))

    assert reported == "世 x"


@pytest.mark.parametrize("output", [list(("ab 世👋 cd" * 40).encode()), [0xFF] * 400, [0xE4, 0xB8] * 200])
def test_a_long_text_is_decoded_in_short_windows(output: list[int]) -> None:
    longest = 0

    class Measured(ByteTokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    assert "".join(pieces(Measured(), [65], output)) == bytes(output).decode(errors="replace")
    assert longest <= 24


@pytest.mark.parametrize(
    ("chunks", "stop", "text"),
    [
        (["a", "DE", "FG", "Hx"], ("FGH",), "aDE"),
        (["a", "DE", "F", "G", "HI", "J"], ("FGHX", "GHI"), "aDEF"),
        (["one", "\n", "\n", "two"], ("\n\n",), "one"),
        (["xyz"], ("yz", "xyz"), ""),
        (["aab"], ("ab",), "a"),
        (["aaab"], ("aab",), "a"),
    ],
)
def test_a_stop_string_is_cut_at_any_position(chunks: list[str], stop: tuple[str, ...], text: str) -> None:
    """vllm#3574, TGI#1039: stop strings over several tokens leaked their start or were missed."""
    strings = StopStrings(stop)

    reported = [strings.push(chunk) for chunk in chunks]

    assert "".join(reported) + strings.close() == text
    assert strings.matched


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_for_any_division_into_chunks(chunks: list[str], stop: list[str]) -> None:
    whole = StopStrings(tuple(stop))
    expected = whole.push("".join(chunks)) + whole.close()
    strings = StopStrings(tuple(stop))
    reported = "".join(map(strings.push, chunks)) + strings.close()

    assert reported == expected
    assert strings.matched is whole.matched is any(one in "".join(chunks) for one in stop)
    assert not any(one in reported for one in stop)


def test_a_text_that_ends_inside_a_character_or_stop_string_is_complete() -> None:
    params = SamplingParams(stop=("cd!",))

    assert final_text(ByteTokenizer(), [65], list(b"ab\xe4"), params) == "ab\ufffd"
    assert final_text(ByteTokenizer(), [65], list(b"abcd"), params) == "abcd"


@given(st.binary(max_size=40), st.integers(0, 40))
def test_a_resumed_stream_equals_an_uninterrupted_one(output: bytes, crash: int) -> None:
    params = SamplingParams(stop=("zzzz", "\u4e16"))
    tokenizer, prompt = ByteTokenizer(), list(b"prompt")
    first = Detokenizer(tokenizer, prompt, params)
    reported = "".join(map(first.push, output[:crash]))
    second = Detokenizer(tokenizer, prompt, params)
    assert "".join(map(second.push, output[:crash])) == reported
    reported += "".join(map(second.push, output[crash:])) + second.close()

    assert reported == final_text(tokenizer, prompt, list(output), params)


def test_a_stop_string_ignored_on_arrival_stays_ignored() -> None:
    """It is held as the start of a longer one; only stop strings that end in new text may stop."""
    strings = StopStrings(("ab", "xabq"))

    assert strings.push("xab", may_stop=False) == ""
    assert strings.push("c") == "xabc"
    assert not strings.matched
    assert strings.push("ab") == ""
    assert strings.matched
