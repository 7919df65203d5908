"""Texts in parameters become token ids; ids outside the vocabulary are refused."""

import pytest

from engine.errors import InvalidParameter
from engine.requests.engine_request import EngineRequest
from engine.requests.input_processor import InputProcessor
from engine.sampling_params import SamplingParams
from tests.engine.fakes import EOS, VOCAB_SIZE, PieceTokenizer, WordTokenizer, build_engine

PROCESSOR = InputProcessor(WordTokenizer(), frozenset({EOS}), VOCAB_SIZE)


def ends(**params: object) -> frozenset[int]:
    return PROCESSOR.resolve(SamplingParams(**params)).constraints.end_token_ids  # type: ignore[arg-type]


def bad(*words: str) -> tuple[tuple[int, ...], ...]:
    return PROCESSOR.resolve(SamplingParams(bad_words=words)).constraints.bad_token_ids


def test_end_tokens_of_a_request() -> None:
    assert ends() == {EOS}
    assert ends(ignore_eos=True) == set()
    assert ends(stop_token_ids=(5,), stop=("<eos2>", "<6>", "text")) == {EOS, 5, 998}
    assert ends(stop_token_ids=(EOS,), ignore_eos=True) == {EOS}


def test_bad_words_are_encoded_with_and_without_a_leading_space() -> None:
    assert bad("<7>") == ((7,), (507,))
    assert bad("<7><8>", " <7>") == ((7, 8), (507, 8), (7,), (507,))


def test_a_word_with_tokens_only_after_a_space_has_one_variant() -> None:
    processor = InputProcessor(PieceTokenizer("a", " word"), frozenset(), 10)

    assert processor.resolve(SamplingParams(bad_words=("word",))).constraints.bad_token_ids == ((1,),)


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="bad_words"):
        bad("no tokens")


def test_an_invalid_bad_word_is_refused_under_its_field() -> None:
    class Strict(WordTokenizer):
        def encode_text(self, text: str) -> list[int]:
            raise InvalidParameter("text", "cannot be encoded")

    with pytest.raises(InvalidParameter) as refused:
        InputProcessor(Strict(), frozenset(), VOCAB_SIZE).resolve(SamplingParams(bad_words=("word",)))

    assert refused.value.field == "bad_words"
    assert refused.value.message == "cannot be encoded"


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1000], {}, "prompt"),
        ([5279552648203111001], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1], {"stop_token_ids": (99999,)}, "stop_token_ids"),
        ([1], {"stop_token_ids": (99999,), "min_tokens": 3}, "stop_token_ids"),
        ([1], {"logit_bias": {1000: 5.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": (5, 1000)}, "allowed_token_ids"),
    ],
)
def test_an_unknown_token_id_is_refused_and_leaves_no_state(
    prompt: list[int], params: dict[str, object], field: str
) -> None:
    """vllm#9634, vllm#54195: ids outside the vocabulary crashed the forward pass or wrote elsewhere."""
    engine, _ = build_engine()

    with pytest.raises(InvalidParameter) as refused:
        engine.add(EngineRequest("a", prompt, SamplingParams(**params), arrival_time=0.0))  # type: ignore[arg-type]

    assert refused.value.field == field
    assert not engine.has_work
    assert not engine.cancel("a")
