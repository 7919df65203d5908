"""A grammar that exhausts a process ends a child; the next grammar is compiled."""

import gc
import json
import signal

import pytest

from engine.execution.text.grammar_sandbox import TOO_LARGE, GrammarSandbox

GOOD = 'start: "a" | /b+/'
MANY_PATTERNS = "start: %json " + json.dumps(
    {"allOf": [{"type": "string", "pattern": f"a.{{{index}}}b"} for index in range(10, 40)]}
)
LARGE = 'start: %json {"type": "integer", "multipleOf": 1000003}'


def test_good_and_bad_grammars() -> None:
    sandbox = GrammarSandbox(60.0)
    assert sandbox.error_of(GOOD) == ""
    assert "other" in sandbox.error_of("start: other")
    assert sandbox.error_of("start: /\N{DIGIT ONE}\n\N{GRINNING FACE}/") == ""


def test_one_child_compiles_many_grammars() -> None:
    sandbox = GrammarSandbox(60.0)
    assert [sandbox.error_of(GOOD) for _ in range(3)] == ["", "", ""]
    assert len(sandbox._idle) == 1


def test_a_grammar_that_takes_too_long_is_ended() -> None:
    sandbox = GrammarSandbox(1.0)
    assert sandbox.error_of(MANY_PATTERNS) == "the grammar took more than 1 seconds to compile; simplify it"
    assert sandbox._idle == []
    assert GrammarSandbox(60.0).error_of(GOOD) == ""


def test_a_grammar_that_takes_too_much_memory_is_ended() -> None:
    sandbox = GrammarSandbox(60.0, max_bytes=150 << 20)
    assert sandbox.error_of(GOOD) == ""
    assert sandbox.error_of(LARGE) == TOO_LARGE
    assert sandbox.error_of(GOOD) == ""


def test_a_killed_child_is_replaced() -> None:
    sandbox = GrammarSandbox(60.0)
    sandbox.error_of(GOOD)
    sandbox._idle[0].kill()
    sandbox._idle[0].wait()
    assert sandbox.error_of(GOOD) == ""


@pytest.mark.parametrize("start", ["", GOOD])
def test_children_end_with_their_sandbox(start: str) -> None:
    sandbox = GrammarSandbox(60.0)
    sandbox.error_of(start or "start: x")
    child = sandbox._idle[0]
    assert child.poll() is None
    del sandbox
    gc.collect()
    assert child.returncode == -signal.SIGKILL


def test_a_child_ends_with_its_parent() -> None:
    sandbox = GrammarSandbox(60.0)
    sandbox.error_of(GOOD)
    child = sandbox._idle[0]
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60.0) == 0
