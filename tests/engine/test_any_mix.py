"""Any mix of requests, cancels, grammars and deadlines: each output ends once, and no state is left."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import StepOutput
from engine.requests.deadlines import Deadlines
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import Clock, ScriptedExecutor, ScriptedRunner, add, build_engine, words
from tests.engine.requests.grammars import Countdown, ScriptedCompiler

GRAMMAR_LENGTH = 3
CONFIGS = st.fixed_dictionaries(
    {
        "num_kv_blocks": st.integers(6, 16),
        "max_num_batched_tokens": st.integers(2, 12),
        "max_num_seqs": st.integers(1, 5),
        "prefix_caching": st.booleans(),
    }
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt_len": st.integers(1, 12),
        "n": st.integers(1, 4),
        "max_tokens": st.integers(1, 6),
        "is_structured": st.booleans(),
        "limit": st.sampled_from(
            (None, None, "queue_timeout_seconds", "ttft_timeout_seconds", "timeout_seconds")
        ),
    }
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.sampled_from(("cancel", "discard", "step")), st.integers(0, 9)),
    st.tuples(st.sampled_from(("step", "step", "drain", "tick", "compile", "break")), st.none()),
)


class Mix:
    """An engine, its requests, and their outputs."""

    def __init__(self, config: dict[str, Any], executor: ScriptedExecutor | None = None) -> None:
        self.clock = Clock()
        self.compiler = ScriptedCompiler()
        self.engine, _ = build_engine(
            clock=self.clock, grammar_compiler=self.compiler, executor=executor, **config
        )
        self.requests: dict[str, dict[str, Any]] = {}
        self.discarded: set[str] = set()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.num_reported: Counter[str] = Counter()
        self.num_generated = 0

    def act(self, name: str, argument: object) -> None:
        match name, argument:
            case "add", dict():
                self.add(argument)
            case (("cancel" | "discard"), int()) if argument < len(self.requests):
                request_id = list(self.requests)[argument]
                if getattr(self.engine, name)(request_id) and name == "discard":
                    self.discarded.add(request_id)
            case "drain", _:
                self.engine.drain()
            case "step", _:
                self.record(self.engine.step(None if argument is None else f"r{argument}"))
            case "tick", _:
                self.clock.now += 2.0
            case (("compile" | "break"), _):
                self.compiler.finish("no grammar" if name == "break" else lambda: Countdown(GRAMMAR_LENGTH))

    def add(self, request: dict[str, Any]) -> None:
        request_id = f"r{len(self.requests)}"
        self.requests[request_id] = request
        limit = request["limit"]
        add(
            self.engine,
            request_id,
            request["prompt_len"],
            deadlines=Deadlines(**({limit: 3.0} if limit else {})),
            n=request["n"],
            max_tokens=request["max_tokens"],
            structured_outputs=StructuredOutputs(regex="a") if request["is_structured"] else None,
        )

    def record(self, step: StepOutput) -> None:
        for one in step.outputs:
            key = (one.request_id, one.index)
            assert one.request_id not in self.discarded
            assert key not in self.ends, "an output after the end"
            if one.token_id is not None:
                self.tokens.setdefault(key, []).append(one.token_id)
            self.texts[key] = self.texts.get(key, "") + one.text + one.held_text
            if one.finish_reason:
                self.ends[key] = one.finish_reason.value
        report = step.report
        assert report.num_waiting == self.engine.num_waiting == sum(n for _, n in report.waiting_reasons)
        assert [one.position for one in self.engine.queue_positions()] == list(
            range(1, report.num_waiting + 1)
        )
        self.num_generated += report.num_generated_tokens
        self.num_reported.update(one.reason for one in report.finished)

    def run_to_end(self) -> None:
        for _ in range(500):
            if not self.engine.has_work:
                return
            self.act("compile", None)
            self.act("step", None)
        raise AssertionError("unfinished after 500 steps")


@pytest.mark.parametrize("is_asynchronous", [False, True])
@given(CONFIGS, st.lists(ACTIONS, max_size=25))
def test_each_output_ends_once_with_its_own_text_and_no_state_is_left(
    is_asynchronous: bool, config: dict[str, Any], actions: list[tuple[str, object]]
) -> None:
    mix = Mix(config, ScriptedExecutor(ScriptedRunner()) if is_asynchronous else None)
    for name, argument in actions:
        mix.act(name, argument)
    mix.run_to_end()

    kept = [one for one in mix.requests if one not in mix.discarded]
    expected = {(one, index) for one in kept for index in range(mix.requests[one]["n"])}
    assert {key for key in mix.ends if key[0] in kept} == expected
    for request_id, index in expected:
        check_output(mix, request_id, index)
    assert mix.num_reported.total() == len(kept)
    assert mix.num_generated == sum(map(len, mix.tokens.values()))
    assert_empty(mix)


def check_output(mix: Mix, request_id: str, index: int) -> None:
    request, end = mix.requests[request_id], mix.ends[request_id, index]
    tokens = mix.tokens.get((request_id, index), [])
    assert tokens == list(range(100, 100 + len(tokens)))
    assert mix.texts[request_id, index] == words(tokens)
    assert end != "timeout" or request["limit"]
    assert end != "stop" or (request["is_structured"] and len(tokens) == GRAMMAR_LENGTH)
    assert end != "length" or len(tokens) == request["max_tokens"]
    assert end != "error" or (request["is_structured"] and not tokens)


def assert_empty(mix: Mix) -> None:
    engine = mix.engine
    assert engine.num_tracked == 0
    assert mix.compiler.submitted == {}
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.scheduler.block_manager.num_free_blocks == engine.config.num_kv_blocks
