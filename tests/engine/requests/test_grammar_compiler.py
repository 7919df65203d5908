"""The grammar compiler: bad grammars delay no other request, and nothing grows without bound."""

import threading
from collections.abc import Callable
from typing import cast

import pytest

from engine.errors import InvalidParameter
from engine.requests.grammar_compiler import BUSY, GrammarCompilerPool, GrammarFactory
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import Clock

PATIENCE = 20.0
FOREVER = 1e6
"""A call that waits this long exceeds the time limit of its test."""


class GatedBackend:
    """Returns each regex; those that start with "hang" wait for a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.compiled: list[str] = []
        self.is_usable = True

    def check(self) -> None:
        if not self.is_usable:
            raise InvalidParameter("structured_outputs", "not with this tokenizer")

    def compile(self, structured_outputs: StructuredOutputs) -> GrammarFactory:
        regex = structured_outputs.regex
        assert regex is not None
        self.compiled.append(regex)
        self.entered.release()
        if regex.startswith("hang"):
            assert self.gate.wait(PATIENCE)
        if regex.startswith("bad"):
            raise ValueError(f"{regex} is bad")
        if regex.startswith("busy") and self.compiled.count(regex) == 1:
            raise BlockingIOError("no process available")
        if regex.startswith("panic"):
            raise BaseException("a panic")
        return cast(GrammarFactory, lambda: regex)


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def collect(compiler: GrammarCompilerPool, count: int) -> dict[str, str | GrammarFactory]:
    """The next `count` results, by key."""
    ready: dict[str, str | GrammarFactory] = {}
    while len(ready) < count:
        compiler.wait(PATIENCE)
        new = compiler.pop_ready()
        assert new, "no result in time"
        assert not set(dict(new)) & set(ready), "a key was returned twice"
        ready.update(new)
    return ready


def until(condition: Callable[[], bool]) -> None:
    waiter = threading.Event()
    for _ in range(2000):
        if condition():
            return
        waiter.wait(0.01)
    raise AssertionError("the condition did not become true")


def test_every_key_is_returned_once() -> None:
    compiler = GrammarCompilerPool(GatedBackend())
    for index in range(20):
        compiler.submit(f"r{index}", regex(f"a{index}"))
    ready = collect(compiler, 20)
    assert {key: factory() for key, factory in ready.items()} == {f"r{i}": f"a{i}" for i in range(20)}  # type: ignore[operator]
    assert compiler.pop_ready() == []


def test_a_bad_grammar_fails_alone() -> None:
    """vllm#43920: one malformed grammar ended the engine."""
    compiler = GrammarCompilerPool(GatedBackend())
    for key in ("bad", "panic", "good"):
        compiler.submit(key, regex(key))
    ready = collect(compiler, 3)
    assert ready["bad"] == "bad is bad"
    assert ready["panic"] == "a panic"
    assert callable(ready["good"])


def test_the_same_grammar_is_compiled_once() -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend)
    compiler.submit("a", regex("hang"))
    assert backend.entered.acquire(timeout=PATIENCE)
    compiler.submit("b", regex("hang"))
    backend.gate.set()
    collect(compiler, 2)
    compiler.submit("c", regex("hang"))
    assert [key for key, _ in compiler.pop_ready()] == ["c"]
    assert backend.compiled == ["hang"]


def test_errors_are_cached() -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend)
    compiler.submit("a", regex("bad"))
    collect(compiler, 1)
    compiler.submit("b", regex("bad"))
    assert compiler.pop_ready() == [("b", "bad is bad")]
    assert backend.compiled == ["bad"]


def test_the_least_recently_used_result_is_evicted() -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend, max_cached=2, num_threads=1)
    for name in ("a", "b", "a", "c", "a", "b"):
        compiler.submit(name, regex(name))
        collect(compiler, 1)
    assert backend.compiled == ["a", "b", "c", "b"]


def test_a_compilation_that_never_returns_blocks_no_other() -> None:
    backend, clock = GatedBackend(), Clock()
    compiler = GrammarCompilerPool(backend, num_threads=1, max_threads=2, timeout_seconds=10.0, clock=clock)
    compiler.submit("slow", regex("hang"))
    assert backend.entered.acquire(timeout=PATIENCE)
    compiler.submit("next", regex("next"))
    assert compiler.pop_ready() == []
    clock.now = 10.0
    ready = dict(compiler.pop_ready())
    assert ready.pop("slow") == "the grammar was not compiled within 10 seconds; simplify it"
    assert callable((ready or collect(compiler, 1))["next"])
    backend.gate.set()
    until(lambda: compiler.num_threads == 0)
    # The late result is cached for later requests.
    compiler.submit("again", regex("hang"))
    assert callable(dict(compiler.pop_ready())["again"])


def test_threads_are_bounded_and_queued_requests_fail_as_busy() -> None:
    backend, clock = GatedBackend(), Clock()
    compiler = GrammarCompilerPool(backend, num_threads=2, max_threads=3, timeout_seconds=10.0, clock=clock)
    for index in range(5):
        compiler.submit(f"r{index}", regex(f"hang{index}"))
    answers: dict[str, object] = {}
    for num_started in (2, 3):
        until(lambda n=num_started: len(backend.compiled) == n)  # type: ignore[misc]
        clock.now += 10.0
        answers.update(compiler.pop_ready())
    assert compiler.num_threads == 3
    assert [answers[f"r{index}"] for index in (3, 4)] == [BUSY, BUSY]
    assert all("not compiled within" in str(answers[f"r{index}"]) for index in range(3))
    backend.gate.set()
    until(lambda: compiler.num_threads == 0)
    compiler.submit("later", regex("later"))
    until(lambda: "later" in backend.compiled)


def test_an_abandoned_thread_that_returns_makes_room_for_another() -> None:
    backend, clock = GatedBackend(), Clock()
    compiler = GrammarCompilerPool(backend, num_threads=1, max_threads=1, timeout_seconds=10.0, clock=clock)
    compiler.submit("slow", regex("hang"))
    assert backend.entered.acquire(timeout=PATIENCE)
    clock.now = 10.0
    compiler.pop_ready()
    compiler.submit("next", regex("next"))
    backend.gate.set()
    until(lambda: compiler.num_threads == 0)
    assert backend.compiled == ["hang", "next"]


@pytest.mark.parametrize("is_running", [True, False])
def test_a_cancelled_key_is_not_returned(is_running: bool) -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend, num_threads=1)
    compiler.submit("first", regex("hang"))
    assert backend.entered.acquire(timeout=PATIENCE)
    compiler.submit("second", regex("second"))
    compiler.cancel("first" if is_running else "second")
    compiler.cancel("unknown")
    backend.gate.set()
    until(lambda: compiler.num_threads == 0)
    assert [key for key, _ in compiler.pop_ready()] == ["second" if is_running else "first"]
    assert backend.compiled == (["hang", "second"] if is_running else ["hang"])


def test_a_ready_result_can_be_cancelled() -> None:
    compiler = GrammarCompilerPool(GatedBackend())
    compiler.submit("a", regex("a"))
    compiler.wait(PATIENCE)
    compiler.cancel("a")
    assert compiler.pop_ready() == []


@pytest.mark.timeout(60)
def test_waiting_without_work_returns_at_once() -> None:
    compiler = GrammarCompilerPool(GatedBackend())
    compiler.wait(FOREVER)
    compiler.submit("a", regex("a"))
    collect(compiler, 1)
    compiler.wait(FOREVER)


def test_waiting_returns_after_its_timeout() -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend)
    compiler.submit("a", regex("hang"))
    compiler.wait(0.01)
    assert compiler.pop_ready() == []
    backend.gate.set()
    collect(compiler, 1)


@pytest.mark.timeout(60)
def test_waiting_returns_when_a_compilation_times_out() -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend, timeout_seconds=0.05)
    compiler.submit("a", regex("hang"))
    compiler.wait(FOREVER)
    assert "not compiled within" in str(compiler.pop_ready())
    backend.gate.set()
    until(lambda: compiler.num_threads == 0)


def test_threads_end_and_keep_no_process_alive() -> None:
    backend = GatedBackend()
    compiler = GrammarCompilerPool(backend)
    compiler.submit("a", regex("hang"))
    assert backend.entered.acquire(timeout=PATIENCE)
    assert all(one.daemon for one in threading.enumerate() if one.name == "grammar")
    backend.gate.set()
    collect(compiler, 1)
    until(lambda: compiler.num_threads == 0)
    until(lambda: not any(one.name == "grammar" for one in threading.enumerate()))


def test_a_model_without_grammars_refuses_at_once() -> None:
    backend = GatedBackend()
    backend.is_usable = False
    compiler = GrammarCompilerPool(backend)
    with pytest.raises(InvalidParameter, match="not with this tokenizer"):
        compiler.submit("a", regex("a"))
    assert compiler.num_threads == 0


def test_if_no_thread_can_be_started_requests_fail_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompilerPool(GatedBackend())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        compiler.submit("first", regex("a"))
        assert compiler.pop_ready() == [("first", BUSY)]

    compiler.submit("second", regex("a"))
    assert callable(collect(compiler, 1)["second"])


def test_failures_for_lack_of_resources_are_not_cached() -> None:
    compiler = GrammarCompilerPool(GatedBackend())
    compiler.submit("first", regex("busy"))
    assert "try again later" in str(collect(compiler, 1)["first"])

    compiler.submit("second", regex("busy"))
    assert callable(collect(compiler, 1)["second"])
