"""Requests that wait for a grammar delay and fail no other request."""

import pytest

from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.outputs import ResumedOutput, WaitingReason
from engine.requests.deadlines import Deadlines
from engine.sequence import FinishReason
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import Clock, ScriptedRunner, add, build_engine, run, words
from tests.engine.requests.grammars import Countdown, ScriptedCompiler

ONE_WORD = StructuredOutputs(regex="word")


def build(runner: ScriptedRunner | None = None, **limits: object) -> tuple[Engine, ScriptedCompiler]:
    compiler = ScriptedCompiler()
    engine, _ = build_engine(runner, grammar_compiler=compiler, **limits)  # type: ignore[arg-type]
    return engine, compiler


def test_a_request_is_held_outside_the_queue_while_others_run() -> None:
    engine, compiler = build()
    add(engine, "a", 3, max_tokens=9, structured_outputs=ONE_WORD)
    add(engine, "b", 3, max_tokens=4)

    for _ in range(2):
        assert [one.request_id for one in engine.step().outputs] == ["b"]
    assert [(one.request_id, one.reason) for one in engine.queue_positions()] == [
        ("a", WaitingReason.GRAMMAR)
    ]
    assert dict(engine.step().report.waiting_reasons) == {"grammar": 1}
    compiler.finish(lambda: Countdown(3))

    assert compiler.num_waits == 0, "the engine had other work"
    result = run(engine)
    assert result["a"] == ([100, 101, 102], words([100, 101, 102]), "stop")
    assert result["b"][2] == "length"


def test_a_step_without_other_work_waits_instead_of_spinning() -> None:
    engine, compiler = build()
    add(engine, "a", 3, n=2, max_tokens=9, structured_outputs=ONE_WORD)
    compiler.on_wait = lambda: compiler.finish(lambda: Countdown(1)) if compiler.num_waits == 3 else None

    assert engine.step().outputs == engine.step().outputs == ()
    assert len(engine.step().outputs) == 1

    assert compiler.num_waits == 3
    run(engine)
    assert compiler.num_waits == 3, "no request waits for a grammar any more"


def test_a_bad_grammar_fails_only_its_request_with_its_error() -> None:
    engine, compiler = build()
    add(engine, "a", 3, n=2, structured_outputs=ONE_WORD)
    add(engine, "b", 3, max_tokens=2)
    compiler.finish("unbalanced parenthesis")

    outputs = [one for one in engine.step().outputs if one.request_id == "a"]

    assert [(one.index, one.finish_reason, one.error) for one in outputs] == [
        (index, FinishReason.ERROR, "structured_outputs: unbalanced parenthesis") for index in (0, 1)
    ]
    assert run(engine)["b"][2] == "length"


def test_an_engine_without_a_compiler_refuses_structured_outputs() -> None:
    engine, _ = build_engine()

    with pytest.raises(InvalidParameter) as refused:
        add(engine, "a", 3, structured_outputs=ONE_WORD)

    assert refused.value.field == "structured_outputs"
    assert not engine.has_work


def test_a_request_whose_grammar_cannot_be_submitted_is_refused() -> None:
    engine, compiler = build()

    def refuse(key: str, structured_outputs: StructuredOutputs) -> None:
        raise InvalidParameter("structured_outputs", "not with this tokenizer")

    compiler.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(InvalidParameter, match="not with this tokenizer"):
        add(engine, "a", 3, structured_outputs=StructuredOutputs(regex="a"))

    assert not engine.has_work
    add(engine, "a", 3, max_tokens=1)
    assert run(engine)["a"][2] == "length"


def test_a_submission_that_fails_midway_is_cancelled() -> None:
    engine, compiler = build()
    submit = compiler.submit

    def fail_midway(key: str, structured_outputs: StructuredOutputs) -> None:
        submit(key, structured_outputs)
        raise RuntimeError("no thread")

    compiler.submit = fail_midway  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no thread"):
        add(engine, "a", 3, structured_outputs=ONE_WORD)

    assert compiler.submitted == {}
    assert engine.num_tracked == 0


def test_each_output_has_its_own_grammar() -> None:
    runner = ScriptedRunner({"a/0": [1, 2, 3], "a/1": [4, 5, 6]})
    engine, compiler = build(runner)
    add(engine, "a", 3, n=2, max_tokens=9, structured_outputs=ONE_WORD)
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown(2))
        return made[-1]

    compiler.finish(make)

    assert run(engine) == {"a": ([1, 2], words([1, 2]), "stop"), "a/1": ([4, 5], words([4, 5]), "stop")}
    assert [one.shown for one in made] == [[1, 2], [4, 5]]


def test_a_token_that_the_grammar_forbids_fails_only_its_output() -> None:
    engine, compiler = build(ScriptedRunner({"a/0": [1, 666], "a/1": [1, 2]}))
    add(engine, "a", 3, n=2, max_tokens=9, structured_outputs=ONE_WORD)
    compiler.finish(lambda: Countdown(2))

    assert run(engine) == {"a": ([1], "<1>", "error"), "a/1": ([1, 2], words([1, 2]), "stop")}


def test_a_complete_text_at_max_tokens_has_the_finish_reason_stop() -> None:
    engine, compiler = build()
    add(engine, "a", 3, max_tokens=2, structured_outputs=ONE_WORD)
    compiler.finish(lambda: Countdown(2))

    assert run(engine)["a"][2] == "stop"


def test_a_grammar_does_not_end_an_output_before_min_tokens() -> None:
    engine, compiler = build()
    add(engine, "a", 3, min_tokens=4, max_tokens=9, structured_outputs=ONE_WORD)
    compiler.finish(lambda: Countdown(2))

    assert run(engine)["a"][0] == [100, 101, 102, 103, 104]


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "end"), [((100, 101), 9, "stop"), ((100, 101), 2, "stop"), ((100,), 1, "length")]
)
def test_a_resumed_output_that_was_complete_only_finishes(
    tokens: tuple[int, ...], max_tokens: int, end: str
) -> None:
    engine, compiler = build()
    resumed = (ResumedOutput(0, tokens),)
    add(engine, "a", 3, max_tokens=max_tokens, structured_outputs=ONE_WORD, resumed=resumed)
    compiler.finish(lambda: Countdown(2))

    assert run(engine) == {"a": ([], "", end)}


def test_a_resumed_output_continues_at_its_position_in_the_grammar() -> None:
    engine, compiler = build()
    resumed = (ResumedOutput(0, (100, 101)), ResumedOutput(1, (100, 101, 102)))
    add(engine, "a", 3, n=3, max_tokens=9, structured_outputs=ONE_WORD, resumed=resumed)
    compiler.finish(lambda: Countdown(3))

    assert run(engine) == {
        "a": ([102], "<102>", "stop"),
        "a/1": ([], "", "stop"),
        "a/2": ([100, 101, 102], words([100, 101, 102]), "stop"),
    }


def test_resumed_tokens_that_do_not_match_fail_only_their_output() -> None:
    engine, compiler = build()
    resumed = (ResumedOutput(0, (666,)),)
    add(engine, "a", 3, n=2, max_tokens=9, structured_outputs=ONE_WORD, resumed=resumed)
    compiler.finish(lambda: Countdown(1))

    outputs = sorted(engine.step().outputs, key=lambda one: one.index)

    assert [(one.index, one.finish_reason) for one in outputs] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.STOP),
    ]
    assert outputs[0].error == "structured_outputs: ValueError: no such word"


def test_a_request_that_finishes_while_compiling_is_cancelled_and_frees_its_id() -> None:
    engine, compiler = build()
    add(engine, "a", 3, structured_outputs=ONE_WORD)
    engine.cancel("a")
    assert run(engine) == {"a": ([], "", "cancelled")}
    add(engine, "a", 3, structured_outputs=StructuredOutputs(regex="other"))
    engine.discard("a")
    add(engine, "a", 3, structured_outputs=StructuredOutputs(regex="third"))

    assert [one.regex for one in compiler.submitted.values()] == ["third"]
    compiler.finish(lambda: Countdown(1))
    assert run(engine) == {"a": ([100], "<100>", "stop")}
    assert not engine.is_compiling


def test_a_deadline_expires_while_nothing_can_run() -> None:
    clock = Clock()
    engine, compiler = build(clock=clock)
    add(engine, "a", 3, structured_outputs=ONE_WORD, deadlines=Deadlines(queue_timeout_seconds=5))

    assert engine.step().outputs == ()
    assert engine.has_work
    clock.now = 5.0
    (end,) = engine.step().outputs

    assert end.error == "not started within queue_timeout_seconds (5 s)"
    assert compiler.submitted == {}
    assert not engine.has_work
