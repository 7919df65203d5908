"""A grammar that is too much for a process ends a child, and the next grammar is served."""

import gc
import json
import signal

import pytest

from engine.execution.text.grammar_sandbox import TOO_LARGE, Trials

GOOD = 'start: "a" | /b+/'
MANY_PATTERNS = "start: %json " + json.dumps(
    {"allOf": [{"type": "string", "pattern": f"a.{{{index}}}b"} for index in range(10, 40)]}
)
LARGE = 'start: %json {"type": "integer", "multipleOf": 1000003}'


def test_a_good_grammar_has_no_error_and_a_bad_one_has() -> None:
    trials = Trials(60.0)
    assert trials.error_of(GOOD) == ""
    assert "other" in trials.error_of("start: other")
    assert trials.error_of("start: /\N{DIGIT ONE}\n\N{GRINNING FACE}/") == ""


def test_one_child_serves_many() -> None:
    trials = Trials(60.0)
    assert [trials.error_of(GOOD) for _ in range(3)] == ["", "", ""]
    assert len(trials._idle) == 1


def test_a_grammar_that_takes_too_long_is_ended() -> None:
    trials = Trials(1.0)
    assert trials.error_of(MANY_PATTERNS) == "the grammar took more than 1 seconds to compile; simplify it"
    assert trials._idle == []
    assert Trials(60.0).error_of(GOOD) == ""


def test_a_grammar_that_takes_too_much_memory_is_ended() -> None:
    trials = Trials(60.0, max_bytes=150 << 20)
    assert trials.error_of(GOOD) == ""
    assert trials.error_of(LARGE) == TOO_LARGE
    assert trials.error_of(GOOD) == ""


def test_a_child_that_somebody_else_ended_is_no_grammars_fault() -> None:
    trials = Trials(60.0)
    trials.error_of(GOOD)
    trials._idle[0].kill()
    trials._idle[0].wait()
    assert trials.error_of(GOOD) == ""


@pytest.mark.parametrize("start", ["", GOOD])
def test_children_end_with_who_started_them(start: str) -> None:
    trials = Trials(60.0)
    trials.error_of(start or "start: x")
    child = trials._idle[0]
    assert child.poll() is None
    del trials
    gc.collect()
    assert child.returncode == -signal.SIGKILL


def test_a_child_ends_when_its_parent_is_gone() -> None:
    trials = Trials(60.0)
    trials.error_of(GOOD)
    child = trials._idle[0]
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60.0) == 0
