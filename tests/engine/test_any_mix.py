"""Any mix of requests, cancels, late grammars and limits: each output ends once, and nothing stays."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import StepOutput
from engine.requests.deadlines import Deadlines
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import Clock, ScriptedLauncher, ScriptedRunner, add, build_engine, words
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
    st.tuples(st.sampled_from(("step", "step", "drain", "tick", "compile", "spoil")), st.none()),
)


class Mix:
    """An engine, what it was asked, and what it told."""

    def __init__(self, config: dict[str, int], launcher: ScriptedLauncher | None = None) -> None:
        self.clock = Clock()
        self.compiler = ScriptedCompiler()
        self.engine, _ = build_engine(
            clock=self.clock, grammar_compiler=self.compiler, launcher=launcher, **config
        )
        self.asked: dict[str, dict[str, object]] = {}
        self.discarded: set[str] = set()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.told_texts: dict[tuple[str, int], str] = {}
        self.num_reported: Counter[str] = Counter()
        self.num_generated = 0

    def act(self, name: str, given: object) -> None:
        match name, given:
            case "add", dict():
                self.add(given)
            case (("cancel" | "discard"), int()) if given < len(self.asked):
                request_id = list(self.asked)[given]
                if getattr(self.engine, name)(request_id) and name == "discard":
                    self.discarded.add(request_id)
            case "drain", _:
                self.engine.drain()
            case "step", _:
                self.take(self.engine.step(None if given is None else f"r{given}"))
            case "tick", _:
                self.clock.now += 2.0
            case (("compile" | "spoil"), _):
                self.compiler.finish("no grammar" if name == "spoil" else lambda: Countdown(GRAMMAR_LENGTH))

    def add(self, asked: dict[str, object]) -> None:
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = asked
        limit = asked["limit"]
        add(
            self.engine,
            request_id,
            asked["prompt_len"],  # type: ignore[arg-type]  # drawn as a number
            deadlines=Deadlines(**({limit: 3.0} if limit else {})),  # type: ignore[dict-item]
            n=asked["n"],
            max_tokens=asked["max_tokens"],
            structured_outputs=StructuredOutputs(regex="a") if asked["is_structured"] else None,
        )

    def take(self, step: StepOutput) -> None:
        for one in step.outputs:
            key = (one.request_id, one.index)
            assert one.request_id not in self.discarded
            assert key not in self.ends, "something after the end"
            if one.token_id is not None:
                self.tokens.setdefault(key, []).append(one.token_id)
            self.told_texts[key] = self.told_texts.get(key, "") + one.text + one.held_text
            if one.finish_reason:
                self.ends[key] = one.finish_reason.value
        report = step.report
        assert report.num_waiting == self.engine.num_waiting == sum(n for _, n in report.waiting_reasons)
        assert [one.position for one in self.engine.queue_positions()] == list(
            range(1, report.num_waiting + 1)
        )
        self.num_generated += report.num_generated_tokens
        self.num_reported.update(one.reason for one in report.finished)

    def run_to_the_end(self) -> None:
        for _ in range(500):
            if not self.engine.has_work:
                return
            self.act("compile", None)
            self.act("step", None)
        raise AssertionError("not done after 500 steps")


@pytest.mark.parametrize("goes_ahead", [False, True])
@given(CONFIGS, st.lists(ACTIONS, max_size=25))
def test_each_output_ends_once_with_its_own_text_and_nothing_stays(
    goes_ahead: bool, config: dict[str, int], actions: list[tuple[str, object]]
) -> None:
    mix = Mix(config, ScriptedLauncher(ScriptedRunner()) if goes_ahead else None)
    for name, given_value in actions:
        mix.act(name, given_value)
    mix.run_to_the_end()

    kept = [one for one in mix.asked if one not in mix.discarded]
    expected = {(one, index) for one in kept for index in range(as_int(mix.asked[one]["n"]))}
    assert {key for key in mix.ends if key[0] in kept} == expected
    for request_id, index in expected:
        check_output(mix, request_id, index)
    assert mix.num_reported.total() == len(kept)
    assert mix.num_generated == sum(map(len, mix.tokens.values()))
    assert_empty(mix)


def check_output(mix: Mix, request_id: str, index: int) -> None:
    asked, end = mix.asked[request_id], mix.ends[request_id, index]
    tokens = mix.tokens.get((request_id, index), [])
    assert tokens == list(range(100, 100 + len(tokens)))
    assert mix.told_texts[request_id, index] == words(tokens)
    assert end != "timeout" or asked["limit"]
    assert end != "stop" or (asked["is_structured"] and len(tokens) == GRAMMAR_LENGTH)
    assert end != "length" or len(tokens) == asked["max_tokens"]
    assert end != "error" or (asked["is_structured"] and not tokens)


def assert_empty(mix: Mix) -> None:
    engine = mix.engine
    assert engine.num_tracked == 0
    assert mix.compiler.submitted == {}
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.scheduler.block_manager.num_free_blocks == engine.config.num_kv_blocks


def as_int(value: object) -> int:
    assert isinstance(value, int)
    return value
