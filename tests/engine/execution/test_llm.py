"""`LLM` on a tiny model from disk."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine import LLM, SamplingParams, StructuredOutputs
from engine.errors import InvalidParameter

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
HELLO: list[Mapping[str, str]] = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), max_model_len=64, num_kv_blocks=64, max_num_seqs=4)


def test_texts_and_ids_give_the_same_in_order(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the quick fox", "hello", "a b c d e f g h", "the lazy dog"]

    results = llm.generate(texts, GREEDY)
    bar = capsys.readouterr().err
    again = llm.generate([one.prompt_token_ids for one in results], GREEDY, show_progress=False)

    assert [one.outputs for one in again] == [one.outputs for one in results]
    assert all(
        len(one.outputs[0].token_ids) == 8 or one.outputs[0].finish_reason == "stop" for one in results
    )
    assert "4/4" in bar
    assert capsys.readouterr().err == ""
    (alone,) = llm.generate(texts[2], GREEDY, show_progress=False)
    assert alone.outputs == results[2].outputs


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=1, ignore_eos=True),
        SamplingParams(max_tokens=3, n=2, ignore_eos=True),
    ]

    results = llm.generate(["hello", "hello"], params, show_progress=False)

    assert [[len(output.token_ids) for output in one.outputs] for one in results] == [[1], [3, 3]]


def test_a_chat_is_a_prompt_in_the_models_template(llm: LLM) -> None:
    (one,) = llm.chat(HELLO, GREEDY, show_progress=False)
    first, second = llm.chat([HELLO, HELLO], GREEDY, show_progress=False)

    assert one.prompt_token_ids == llm._tokenizer.render_chat(HELLO)
    assert one.outputs == first.outputs == second.outputs


def test_a_bad_grammar_fails_only_its_prompt(llm: LLM) -> None:
    forms = [StructuredOutputs(choice=("ab", "cde")), StructuredOutputs(regex="(")]

    good, bad = llm.generate(
        ["hello", "hello"],
        [SamplingParams(max_tokens=20, n=2, structured_outputs=form) for form in forms],
        show_progress=False,
    )

    assert {output.text for output in good.outputs} <= {"ab", "cde"}
    assert {output.finish_reason for output in good.outputs} == {"stop"}
    assert bad.error is not None
    assert bad.error.startswith("structured_outputs: ")


@pytest.mark.parametrize("prompts", [["fine", "\ud83d"], ["fine", 7], ["fine", None]])
def test_a_prompt_that_is_no_text_is_named_by_its_index(llm: LLM, prompts: list[str]) -> None:
    with pytest.raises(InvalidParameter, match=r"^prompt 1: "):
        llm.generate(prompts, GREEDY, show_progress=False)


def test_an_invalid_conversation_is_named_by_its_index(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"^conversation 1: "):
        llm.chat([HELLO, []], GREEDY, show_progress=False)
    invalid: list[Mapping[str, str]] = [{"role": "user", "content": "\ud83d"}]
    with pytest.raises(InvalidParameter, match=r"^conversation 1: .*surrogate"):
        llm.chat([HELLO, invalid], GREEDY, show_progress=False)


def test_a_wrong_number_of_parameters_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="each of the 3 prompts, not 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY], show_progress=False)


@pytest.mark.parametrize("params", [3, "x", {}, (GREEDY,), [None]])
def test_an_object_of_another_type_is_refused(llm: LLM, params: list[SamplingParams]) -> None:
    with pytest.raises(InvalidParameter, match=r"^params: "):
        llm.generate(["a"], params, show_progress=False)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}])
def test_prompts_must_be_a_list(llm: LLM, prompts: list[str]) -> None:
    with pytest.raises(InvalidParameter, match=r"^prompts: "):
        llm.generate(prompts, GREEDY, show_progress=False)
    with pytest.raises(InvalidParameter, match=r"^conversations: "):
        llm.chat(prompts, GREEDY, show_progress=False)  # type: ignore[arg-type]


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY, show_progress=False) == []
    assert llm.chat([], GREEDY, show_progress=False) == []
