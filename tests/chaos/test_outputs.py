"""The output checker detects a wrong token, text or finish reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from engine import LLM
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs
from tests.chaos.outputs import Answer, OutputChecker, answers_of, few_enough
from tests.chaos.workload import EXTRAS, Request
from tests.comparer import reference
from tests.tiny_models import save_model
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

PROMPT = [30, 41, 52]
BODY = {"prompt_token_ids": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
REQUEST = Request(number=1, body=BODY, reader="sse")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def checker(model_dir: Path) -> OutputChecker:
    return OutputChecker(model_dir)


@pytest.fixture(scope="module")
def right(model_dir: Path, checker: OutputChecker) -> Answer:
    """The output of `generate`, step by step."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    token_ids = reference(model, PROMPT, 24).token_ids
    return Answer(token_ids, checker._tokenizer.decode(token_ids), "length")


def faults(checker: OutputChecker, answer: Answer, **body: Any) -> str:
    request = replace(REQUEST, body={**BODY, **body})
    return " ".join(problem.text for problem in checker.check([(request, answer)]))


def test_the_output_of_generate_is_correct(checker: OutputChecker, right: Answer) -> None:
    assert faults(checker, right) == ""
    assert not checker.near_ties
    cut = Answer(right.token_ids[:9], checker._tokenizer.decode(right.token_ids[:8]), "cancelled")
    assert faults(checker, cut) == ""


def test_a_wrong_token_is_detected(checker: OutputChecker, right: Answer) -> None:
    wrong = list(right.token_ids)
    wrong[10] = wrong[10] % 300 + 5
    text = faults(checker, replace(right, token_ids=wrong))
    assert "token 10 of 24 is not the one that is drawn" in text


@pytest.mark.parametrize("place", [0, 11])
def test_a_doubled_or_missing_token_is_detected(checker: OutputChecker, right: Answer, place: int) -> None:
    ids = right.token_ids
    assert "is not the one that is drawn" in faults(
        checker, replace(right, token_ids=[*ids[: place + 1], *ids[place:-1]])
    )
    assert "is not the one that is drawn" in faults(
        checker, replace(right, token_ids=[*ids[:place], *ids[place + 1 :]])
    )


def test_a_wrong_text_or_finish_reason_is_detected(checker: OutputChecker, right: Answer) -> None:
    assert "not that of its tokens" in faults(checker, replace(right, text=right.text[:-1]))
    assert "not that of its tokens" in faults(checker, Answer(right.token_ids[:5], "what?", "cancelled"))
    assert "ends with length at 24" in faults(checker, replace(right, reason="stop"))
    assert "ends with nothing yet at 24" in faults(checker, right, max_tokens=30)
    assert "ends with length at 20" in faults(checker, right, max_tokens=20)


def test_a_stop_string_ends_it_there(checker: OutputChecker, right: Answer) -> None:
    stop = next(char for char in right.text if char.isascii() and char.isalnum())
    assert "undisturbed it ends with stop" in faults(checker, right, stop=[stop])
    length = next(n for n in range(25) if stop in checker._tokenizer.decode(right.token_ids[:n]))
    cut = Answer(right.token_ids[:length], right.text.split(stop)[0], "stop")
    assert faults(checker, cut, stop=[stop]) == ""


SAMPLED = {"prompt_token_ids": PROMPT, "max_tokens": 40, "ignore_eos": True, "seed": 2**60 + 3}
BODIES: list[dict[str, Any]] = [{**SAMPLED, "temperature": 0.8, **extra} for extra in EXTRAS]


def _to_params(body: dict[str, Any]) -> SamplingParams:
    fields: dict[str, Any] = {name: value for name, value in body.items() if name != "prompt_token_ids"}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs.from_json(fields["structured_outputs"])
    return SamplingParams(**fields)


@pytest.fixture(scope="module")
def outputs(model_dir: Path) -> list[list[Answer]]:
    """The engine's outputs for `BODIES`."""
    wanted = [_to_params(body) for body in BODIES]
    results = LLM(str(model_dir), num_kv_blocks=200).generate([PROMPT] * len(wanted), wanted)
    return [
        [Answer(list(one.token_ids), one.text, str(one.finish_reason), one.index) for one in result.outputs]
        for result in results
    ]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_drawn_tokens_are_correct_and_other_tokens_are_not(
    checker: OutputChecker, outputs: list[list[Answer]], number: int
) -> None:
    """Filters, penalties, several outputs and grammars, greedy and sampled."""
    body = {**BODIES[number]}
    for answer in outputs[number]:
        assert faults(checker, answer, **body) == ""
        for place in (0, 7):
            wrong = list(answer.token_ids)
            wrong[place] = next(
                one for one in outputs[number - 1][0].token_ids[place:] if one != wrong[place]
            )
            assert f"token {place} of" in faults(checker, replace(answer, token_ids=wrong), **body)
        assert "ended with" in faults(checker, replace(answer, reason="timeout"), **body)
        assert "not that of its tokens" in faults(checker, replace(answer, text=answer.text + "x"), **body)


def test_another_seed_is_detected(checker: OutputChecker, outputs: list[list[Answer]]) -> None:
    assert "is not the one that is drawn" in faults(checker, outputs[0][0], **{**BODIES[0], "seed": 5})


def test_swapped_outputs_are_detected(checker: OutputChecker, outputs: list[list[Answer]]) -> None:
    number = next(at for at, body in enumerate(BODIES) if body.get("n") == 3)
    swapped = replace(outputs[number][1], index=2)
    assert "is not the one that is drawn" in faults(checker, swapped, **BODIES[number])


def test_an_answer_is_read_from_a_log() -> None:
    events: list[Event] = [
        TokenEvent(id="t", seq=0, token=7, text="a"),
        TokenEvent(id="t", seq=1, token=8, text="b", index=1),
        FinishedEvent(id="t", seq=2, text="c", finish_reason="stop"),
        FinishedEvent(id="t", seq=3, text="d", finish_reason="length", index=1, done=True),
    ]
    assert answers_of(events) == [Answer([7], "ac", "stop"), Answer([8], "bd", "length", index=1)]


def test_a_few_near_ties_are_allowed() -> None:
    assert few_enough(1, 5)
    assert not few_enough(2, 199)
    assert few_enough(2, 200)
