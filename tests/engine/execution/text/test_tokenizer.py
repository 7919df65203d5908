"""Any text becomes ids, or an error that names its field; ids become the exact text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from engine.errors import InvalidParameter
from engine.execution.text.tokenizer import Tokenizer
from tests.tiny_models import BOS, EOS, IM_END, IM_START, PAD, VOCAB_SIZE, make_tokenizer
from tests.tiny_tokenizers import make_sentencepiece

TOKENIZER = Tokenizer(make_tokenizer())
USER = [{"role": "user", "content": "hello world"}]


@given(st.text())
def test_every_text_round_trips(text: str) -> None:
    """Also with NUL, which truncated prompts in llama.cpp#25543, and characters of several tokens."""
    token_ids = TOKENIZER.encode(text)
    assert token_ids[0] == BOS
    assert TOKENIZER.decode(token_ids, skip_special_tokens=True) == text.replace("<s>", "")


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "fine \ud800"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    """hermes-studio#1058, aider#3693: a lone surrogate raised UnicodeEncodeError."""
    with pytest.raises(InvalidParameter, match=r"prompt: .*surrogate"):
        TOKENIZER.encode(text)
    with pytest.raises(InvalidParameter, match=r"messages: .*surrogate"):
        TOKENIZER.render_chat([{"role": "user", "content": text}])


def test_incomplete_characters_are_replaced() -> None:
    token_ids = TOKENIZER.encode("é")[1:]
    assert len(token_ids) == 2
    assert TOKENIZER.decode(token_ids[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_spaces_are_not_cleaned_up() -> None:
    text = "one , two . do n't  three"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_are_skipped_by_default() -> None:
    token_ids = [BOS, *TOKENIZER.encode("fox")[1:], IM_END, EOS]
    assert TOKENIZER.decode(token_ids) == "fox"
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == "<s>fox<|im_end|></s>"
    assert TOKENIZER.special_ids == {BOS, EOS, PAD, IM_START, IM_END}


def test_ids_that_only_the_model_has_leave_no_text() -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    assert TOKENIZER.decode([VOCAB_SIZE + 5]) == ""
    assert TOKENIZER.vocab_size == VOCAB_SIZE


def test_no_special_tokens_are_added_to_a_part_of_a_text() -> None:
    assert TOKENIZER.encode_text("fox") == TOKENIZER.encode("fox")[1:]
    assert TOKENIZER.encode_text("") == []
    with pytest.raises(InvalidParameter, match="surrogate"):
        TOKENIZER.encode_text("\ud83d")


def test_a_special_token_is_found_by_its_text() -> None:
    assert TOKENIZER.special_token_id("<|im_end|>") == IM_END
    assert TOKENIZER.special_token_id("</s>") == EOS
    for text in ("fox", "<|im_end", "<|im_end|> ", ""):
        assert TOKENIZER.special_token_id(text) is None


def test_a_chat_is_rendered_by_the_models_template() -> None:
    token_ids = TOKENIZER.render_chat(USER)
    text = "<s><|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text
    # The template writes the first token; the tokenizer must not add another.
    assert token_ids.count(BOS) == 1


@pytest.mark.parametrize("messages", [[{"role": "critic", "content": "no"}], [{}], []])
def test_a_template_that_refuses_names_the_messages(messages: list[dict[str, str]]) -> None:
    """vllm#39279: an error of a template must not become an internal error."""
    with pytest.raises(InvalidParameter, match=r"messages: .*refuses them"):
        TOKENIZER.render_chat(messages)


def test_a_broken_template_names_the_messages() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(InvalidParameter, match=r"messages: .*refuses them"):
        Tokenizer(tokenizer).render_chat(USER)


def test_a_model_without_a_template() -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template=False))
    assert not tokenizer.has_chat_template
    assert TOKENIZER.has_chat_template
    with pytest.raises(InvalidParameter, match="messages: this model has no chat template"):
        tokenizer.render_chat(USER)


def test_a_tokenizer_without_rust_gives_the_same() -> None:
    """Old formats have no Rust tokenizer."""

    class Old:
        def __init__(self) -> None:
            self._fast = make_tokenizer()

        def __getattr__(self, name: str) -> object:
            if name == "backend_tokenizer":
                raise AttributeError(name)
            return getattr(self._fast, name)

        def __len__(self) -> int:
            return len(self._fast)

    old = Tokenizer(Old())
    for text in ("hello , world", "é"):
        token_ids = TOKENIZER.encode(text)
        assert old.encode(text) == token_ids
        assert old.decode(token_ids) == TOKENIZER.decode(token_ids)
    assert old.render_chat(USER) == TOKENIZER.render_chat(USER)


def test_a_saved_tokenizer_is_loaded(tiny_llama: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama)
    assert tokenizer.encode("the fox") == TOKENIZER.encode("the fox")
    assert tokenizer.eos_token_ids == {EOS}
    assert tokenizer.has_chat_template


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"model: no tokenizer files in"):
        Tokenizer.load(tmp_path)


def test_a_panic_of_the_library_is_an_exception() -> None:
    """`Strip` at both ends panics for a text of one space. The step loop only handles `Exception`."""
    fast = make_sentencepiece()
    fast.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 1)]
    )
    tokenizer = Tokenizer(fast)
    with pytest.raises(RuntimeError, match="the tokenizer failed"):
        tokenizer.decode([fast.get_vocab()["▁"]])
