"""Finish reasons and the text they leave: stop strings, special tokens, `min_tokens`, limits on length."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.outputs import ResumedOutput, SequenceOutput
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer
from tests.engine.fakes import (
    EOS,
    PieceTokenizer,
    ScriptedRunner,
    add,
    build_engine,
    final_text,
    run,
    words,
)


def outputs_of(
    script: list[int], tokenizer: PieceTokenizer | None = None, **params: Any
) -> list[SequenceOutput]:
    engine, _ = build_engine(ScriptedRunner({"a": script}), tokenizer=tokenizer)
    engine.add(EngineRequest("a", [0], SamplingParams(**params), arrival_time=0.0))
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def text_of(outputs: list[SequenceOutput]) -> str:
    return "".join(one.text + one.held_text for one in outputs)


@pytest.mark.parametrize(("included", "text"), [(False, "aDE"), (True, "aDEFGH")])
def test_a_stop_string_that_ends_inside_a_token_is_cut_or_included(included: bool, text: str) -> None:
    """vllm#3574, TGI#1039: a stop string over several tokens was missed, or its start was reported."""
    tokenizer = PieceTokenizer("prompt", "?", "a", "DE", "FG", "Hx")

    reported = outputs_of([2, 3, 4, 5], tokenizer, stop=("FGH",), include_stop_str_in_output=included)

    assert text_of(reported) == text
    assert reported[-1].finish_reason is not None
    assert reported[-1].finish_reason.value == "stop"
    assert not any("F" in one.text for one in reported[:-1]), "none of it before it is complete"


INJURY = PieceTokenizer("prompt", "?", "injury", ".", "<eos>", "<eos2>", num_special=2)


@pytest.mark.parametrize("skips_special", [True, False])
@pytest.mark.parametrize("by", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("included", [True, False])
def test_a_special_token_stops_with_and_without_skip_special_tokens(
    skips_special: bool, by: str, included: bool
) -> None:
    """vllm#2123: a stop that is a special token never matched, since it left no text; vllm#3150: a stop
    token that leaves no text cut the text before it.
    """
    stop = {"stop": ("<eos2>",)} if by == "stop" else {"stop_token_ids": (5,)}
    params = {**stop, "skip_special_tokens": skips_special, "include_stop_str_in_output": included}

    reported = outputs_of([2, 3, 5, 2], INJURY, **params)

    assert [one.token_id for one in reported] == [2, 3, 5]
    assert reported[-1].finish_reason is not None
    assert reported[-1].finish_reason.value == "stop"
    assert text_of(reported) == ("injury.<eos2>" if included and by == "stop" else "injury.")


@pytest.mark.parametrize(("skips_special", "text"), [(True, "injury."), (False, "injury<eos2>.")])
def test_special_tokens_are_text_unless_skipped(skips_special: bool, text: str) -> None:
    reported = outputs_of([2, 5, 3], INJURY, max_tokens=3, skip_special_tokens=skips_special)

    assert text_of(reported) == text


def test_the_text_of_a_special_stop_token_follows_held_text() -> None:
    reported = outputs_of(
        [2, 3, 5], INJURY, stop=(".!", "<eos2>"), include_stop_str_in_output=True, skip_special_tokens=False
    )

    assert [(one.text, one.held_text) for one in reported] == [("injury", ""), ("", ""), ("", ".<eos2>")]


def test_the_text_of_a_special_token_in_ordinary_tokens_stops() -> None:
    tokenizer = PieceTokenizer("prompt", "?", "a<eo", "s2>", "<eos2>", num_special=1)

    reported = outputs_of([2, 3, 2], tokenizer, stop=("<eos2>",))

    assert text_of(reported) == "a"


OTHER_EOS = 7


@pytest.mark.parametrize(
    ("params", "num_tokens", "end"),
    [
        ({}, 3, "stop"),
        ({"ignore_eos": True}, 4, "stop"),
        ({"ignore_eos": True, "stop": ()}, 8, "length"),
        ({"min_tokens": 5}, 6, "stop"),
        ({"min_tokens": 5, "stop_token_ids": (9,)}, 6, "stop"),
        ({"min_tokens": 8}, 8, "length"),
    ],
)
def test_further_eos_tokens_respect_ignore_eos_and_min_tokens(
    params: dict[str, Any], num_tokens: int, end: str
) -> None:
    """vllm#4589, vllm#21987: of several EOS tokens only the first was ignored or postponed, or a stop string
    ended a text before its `min_tokens`.
    """
    script = [100, 9, OTHER_EOS, 4, EOS, OTHER_EOS, 4, 4]
    engine, _ = build_engine(ScriptedRunner({"a": script}), eos_token_ids=frozenset({EOS, OTHER_EOS}))
    add(engine, "a", 2, **{"max_tokens": 8, "stop": ("<4>",), **params})

    tokens, _, reason = run(engine)["a"]

    assert (tokens, reason) == (script[:num_tokens], end)


def test_a_stop_string_before_min_tokens_is_text_and_the_next_one_stops() -> None:
    reported = outputs_of([4, 5, 4, 5], min_tokens=2, stop=("<4>",))

    assert text_of(reported) == words([4, 5])
    assert [one.token_id for one in reported] == [4, 5, 4]


def test_a_stop_string_across_min_tokens_stops() -> None:
    reported = outputs_of([4, 5, 6], min_tokens=1, stop=("<4><5>",))

    assert text_of(reported) == ""
    assert [one.token_id for one in reported] == [4, 5]


PIECES = PieceTokenizer("p", "", "a", "b", "ab", "ca", "bcb")


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 14),
)
def test_the_text_is_that_of_the_tokens_before_the_first_valid_stop(
    script: list[int], stop: list[str], min_tokens: int, included: bool, crash: int
) -> None:
    """Reference: the first position in the whole text where a stop string ends that may stop it."""
    params = SamplingParams(stop=tuple(stop), min_tokens=min_tokens, include_stop_str_in_output=included)
    whole = "".join(PIECES.pieces[one] for one in script)
    token_of = [index for index, one in enumerate(script) for _ in PIECES.pieces[one]]
    ends = [
        (end, -len(one))
        for end, one in itertools.product(range(1, len(whole) + 1), stop)
        if whole[:end].endswith(one) and token_of[end - 1] >= min_tokens
    ]
    end, length = min(ends, default=(len(whole), 0))
    expected = whole[: end if included else end + length]

    assert final_text(PIECES, [0], script, params) == expected
    streams = [Detokenizer(PIECES, [0], params) for _ in range(2)]
    reported = "".join(map(streams[0].push, script[:crash]))
    assert "".join(map(streams[1].push, script[:crash])) == reported
    reported += "".join(map(streams[1].push, script[crash:])) + streams[1].close()
    assert reported == expected
    assert streams[1].stopped is bool(ends)


@pytest.mark.parametrize("crash", range(1, 7))
@pytest.mark.parametrize(
    "params",
    [
        {"stop": ("<103><104>",), "min_tokens": 3},
        {"stop": ("<104>",), "min_tokens": 6, "max_tokens": 6},
        {"stop": ("<101><102>",), "include_stop_str_in_output": True, "max_tokens": 6},
        {"stop": ("<eos2>", "<104><9"), "include_stop_str_in_output": True},
        {"skip_special_tokens": False, "max_tokens": 6},
    ],
)
def test_a_resumed_request_continues_the_text_of_an_uninterrupted_one(
    params: dict[str, Any], crash: int
) -> None:
    script = [100, 101, 102, 103, 104, 998]
    uninterrupted = outputs_of(script, **params)
    before = [one for one in uninterrupted[:crash] if one.token_id is not None]
    engine, _ = build_engine(ScriptedRunner({"a": script}))
    tokens = tuple(one.token_id for one in before if one.token_id is not None)
    add(engine, "a", 1, resumed=(ResumedOutput(0, tokens),), **params)

    after: list[SequenceOutput] = []
    while engine.has_work:
        after += engine.step().outputs

    assert "".join(one.text for one in before) + text_of(after) == text_of(uninterrupted)
    ids = [one.token_id for one in (*before, *after) if one.token_id is not None]
    assert ids == [one.token_id for one in uninterrupted]
    assert after[-1].finish_reason == uninterrupted[-1].finish_reason


def test_ids_and_logprobs_are_reported_while_their_text_is_held() -> None:
    """vllm#36830: text was held for a stop string but ids were not, and they diverged."""
    reported = outputs_of([100, 101, 102, 103], stop=("<101><102><9",), logprobs=1, max_tokens=4)

    assert [one.token_id for one in reported] == [100, 101, 102, 103]
    assert [one.logprobs.token_id for one in reported if one.logprobs] == [100, 101, 102, 103]
    assert [one.text for one in reported] == ["<100>", "", "", words([101, 102, 103])]


def test_logprobs_are_reported_only_if_requested() -> None:
    assert [one.logprobs for one in outputs_of([100, 101], max_tokens=2)] == [None, None]


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(None, 47), (1, 1), (10**9, 47)])
def test_without_max_tokens_an_output_ends_at_the_model_length(
    max_tokens: int | None, num_tokens: int
) -> None:
    """vllm#19862: a null `max_tokens` was an internal error."""
    reported = outputs_of([100], max_tokens=max_tokens)

    assert len(reported) == num_tokens
    assert reported[-1].finish_reason is not None
    assert reported[-1].finish_reason.value == "length"


@pytest.mark.parametrize("max_tokens", [0, -1, True, "5", 1.5])
def test_an_invalid_max_tokens_is_refused(max_tokens: object) -> None:
    """vllm#19862, vllm#39556."""
    with pytest.raises(InvalidParameter, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)  # type: ignore[arg-type]


def test_a_step_of_an_idle_engine_is_empty() -> None:
    """transformers#48303: an engine without work failed."""
    engine, runner = build_engine()

    for _ in range(3):
        step = engine.step()
        assert (step.outputs, step.started, step.report.num_running) == ((), (), 0)
    add(engine, "a", 3, max_tokens=1)

    assert run(engine) == {"a": ([100], "<100>", "length")}
    assert len(runner.steps) == 1
    assert not engine.cancel("a"), "it has finished"
