"""A text too long for any prompt is refused before it is tokenized; tokenizing releases the lock."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.errors import NeverFits
from engine.execution.text.tokenizer import Tokenizer
from engine.requests.input_processor import InputProcessor, prepare_texts
from engine.sampling_params import SamplingParams
from engine.text.token_lengths import _SHRINKING, longest_token_bytes
from tests.tiny_models import VOCAB_SIZE, make_tokenizer
from tests.tiny_tokenizers import make_metaspace, make_sentencepiece, make_wordpiece, make_words


def normalized(normalizer: Any) -> Backend:
    backend = make_tokenizer().backend_tokenizer
    backend.normalizer = normalizer
    return backend


BOUNDED = {
    "byte level": make_tokenizer().backend_tokenizer,
    "sentencepiece": make_sentencepiece().backend_tokenizer,
    "metaspace": make_metaspace().backend_tokenizer,
    **{
        form: normalized(getattr(normalizers, form)()) for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
    },
    "replaced": normalized(normalizers.Sequence([normalizers.Replace("aaaa", "b"), normalizers.NFC()])),
}
# Characters that become much shorter: composed, compatible, or in lower case.
SHRINKING = st.text(st.sampled_from("aé世👋 \u212a\u1100\u1161\u11a8\u0301\U0001d400\U0001fbf9ﬃ<"))


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.text() | SHRINKING | st.sampled_from(["aaaa" * 50, "\u1100\u1161\u11a8" * 20, "\u212a" * 50]))
def test_no_token_stands_for_more_bytes(kind: str, text: str) -> None:
    backend = BOUNDED[kind]
    text = text.encode(errors="ignore").decode()
    longest = longest_token_bytes(backend)

    assert longest is not None
    assert len(backend.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_a_normal_form_shrinks_a_text_by_its_factor_at_most(form: str) -> None:
    """Decomposing and composing, each at its worst."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]

    def size(text: str) -> int:
        return len(text.encode())

    normalize: Any = unicodedata.normalize
    decomposed = form.replace("C", "D") if form.endswith("C") else form
    factor = max(size(one) / size(normalize(decomposed, one)) for one in characters)
    if form.endswith("C"):
        factor *= max(size(normalize("NFD", one)) / size(one) for one in characters)
    assert factor <= _SHRINKING[form]
    assert max(size(one) / size(one.lower()) for one in characters) <= _SHRINKING["Lowercase"]


def with_added(**flags: bool) -> Backend:
    backend = make_tokenizer().backend_tokenizer
    backend.add_tokens([AddedToken("<|t|>", **flags)])
    return backend


def split(pre_tokenizer: Any) -> Backend:
    backend = make_tokenizer().backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, backend.pre_tokenizer])
    return backend


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (make_wordpiece().backend_tokenizer, "x" * 5000),
        (make_words().backend_tokenizer, "x" * 5000),
        (normalized(normalizers.Strip()), " " * 5000),
        (normalized(normalizers.StripAccents()), "\u0301" * 5000),
        (normalized(normalizers.Replace(Regex(" +"), " ")), " " * 5000),
        (normalized(normalizers.Replace("a", "")), "a" * 5000),
        (split(pre_tokenizers.WhitespaceSplit()), " " * 5000),
        (split(pre_tokenizers.Split("a", "removed")), "a" * 5000),
        (with_added(rstrip=True), "<|t|>" + " " * 5000),
    ],
)
def test_there_is_no_bound_if_a_token_stands_for_any_text(backend: Backend, text: str) -> None:
    assert longest_token_bytes(backend) is None
    assert len(backend.encode(text, add_special_tokens=False).ids) <= 10


class Refusing:
    """Fails in the `encode` that holds the interpreter lock, or with `all_ways` in any."""

    def __init__(self, backend: Any, *, all_ways: bool = False) -> None:
        self._backend = backend
        self._all_ways = all_ways

    def __getattr__(self, name: str) -> Any:
        if name == "encode" or (self._all_ways and "encode" in name):
            pytest.fail(f"{name} was called")
        return getattr(self._backend, name)


def test_a_text_that_is_too_long_is_not_tokenized() -> None:
    """vllm PR10635, sglang PR15097, tiktoken#195: tokenizing a prompt that was then refused took seconds."""
    tokenizer = Tokenizer(make_tokenizer(), max_prompt_tokens=100)
    limit = tokenizer.max_prompt_bytes
    assert limit == 1200
    tokenizer._backend = Refusing(tokenizer._backend, all_ways=True)
    for text in ("the patient was stable. " * 83333, "a" * (limit + 1), "é" * (limit // 2 + 1)):
        with pytest.raises(NeverFits, match=r"prompt: .* 100 tokens.* 1200 bytes"):
            tokenizer.encode(text)
        with pytest.raises(NeverFits, match="messages: "):
            tokenizer.render_chat([{"role": "user", "content": text}])


def test_the_longest_text_is_tokenized() -> None:
    tokenizer = Tokenizer(make_tokenizer(), max_prompt_tokens=100)
    assert len(tokenizer.encode("a" * 1200)) > 100
    unbounded = Tokenizer(make_words(), max_prompt_tokens=100)
    assert unbounded.max_prompt_bytes is None
    assert unbounded.encode("x" * 100_000)


def test_no_path_tokenizes_with_the_lock_held() -> None:
    """The library's `encode` holds the interpreter lock throughout; a batch of one does not."""
    tokenizer = Tokenizer(make_tokenizer())
    tokenizer._backend = Refusing(tokenizer._backend)
    params = SamplingParams(bad_words=("fox", "dog"), stop=("stop", "</s>"))
    prepare_texts(tokenizer, params)
    InputProcessor(tokenizer, frozenset(), VOCAB_SIZE).resolve(params)
    assert tokenizer.encode("the fox")
    for content in ("the fox", "<|im_end|>"):
        assert tokenizer.render_chat([{"role": "user", "content": content}])


def test_texts_of_parameters_are_cached_before_the_step_loop() -> None:
    tokenizer = Tokenizer(make_tokenizer())
    params = SamplingParams(bad_words=tuple("x" * n for n in range(1, 129)))
    prepare_texts(tokenizer, params)
    tokenizer._backend = Refusing(tokenizer._backend, all_ways=True)

    assert InputProcessor(tokenizer, frozenset(), VOCAB_SIZE).resolve(params).constraints.bad_token_ids


def test_a_truncation_in_the_tokenizer_file_does_not_cut_prompts() -> None:
    fast = make_tokenizer()
    fast.backend_tokenizer.enable_truncation(4)
    fast.backend_tokenizer.enable_padding(length=50)
    assert 4 < len(Tokenizer(fast).encode("the quick brown fox jumps")) < 50
