"""Engine steps with a scripted device: finishing, resuming, cancelling and refusing."""

from typing import Any

import pytest

from engine.errors import NeverFits
from engine.outputs import ResumedOutput, StepOutput
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.fakes import EOS, ScriptedRunner, add, build_engine, run, words


def test_the_first_token_may_be_the_last() -> None:
    engine, _ = build_engine(ScriptedRunner({"eos": [EOS]}))
    add(engine, "one", 3, max_tokens=1)
    add(engine, "eos", 3, max_tokens=9)

    assert run(engine) == {"one": ([100], "<100>", "length"), "eos": ([EOS], "", "stop")}
    assert engine.scheduler.running_queue == []


def test_every_finish_reason_of_a_token() -> None:
    runner = ScriptedRunner({"stop_id": [5, 6, 7], "stop_str": [5, 6, 7], "ignores": [EOS, 8, EOS]})
    engine, _ = build_engine(runner)
    add(engine, "stop_id", 2, max_tokens=9, stop_token_ids=(6,))
    add(engine, "stop_str", 2, max_tokens=9, stop=("6><",))
    add(engine, "ignores", 2, max_tokens=3, ignore_eos=True)

    assert run(engine) == {
        "stop_id": ([5, 6], "<5>", "stop"),
        "stop_str": ([5, 6, 7], "<5><", "stop"),
        "ignores": ([EOS, 8, EOS], "<8>", "length"),
    }


@pytest.mark.parametrize(("prompt_len", "num_tokens"), [(47, 1), (46, 2)])
def test_the_model_length_ends_a_sequence(prompt_len: int, num_tokens: int) -> None:
    """vllm#23683: a prompt one token shorter than the model length has room for exactly one token."""
    engine, _ = build_engine()
    add(engine, "a", prompt_len, max_tokens=10)

    tokens, _, end = run(engine)["a"]

    assert (len(tokens), end) == (num_tokens, "length")


def test_a_single_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    """vllm#39734: it preempted itself forever."""
    engine, _ = build_engine(num_kv_blocks=2)
    add(engine, "a", 5)

    tokens, _, end = run(engine, max_steps=10)["a"]

    assert end == "length"
    assert len(tokens) == 4, "8 tokens are computed, and the ninth is sampled"


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8])
@pytest.mark.parametrize("is_batched", [False, True])
def test_prompts_at_a_block_boundary_finish(prompt_len: int, is_batched: bool) -> None:
    """FastDeploy#3288: a prompt of exactly k blocks stalled at batch 1, or lost its second block."""
    engine, runner = build_engine()
    add(engine, "a", prompt_len, max_tokens=6)
    engine.step()
    if is_batched:
        add(engine, "b", 5, max_tokens=2)

    result = run(engine, max_steps=8)

    assert result["a"][0] == [101, 102, 103, 104, 105]
    computed = [(start, n) for step in runner.steps for who, start, n in step if who == "a"]
    assert computed == [(0, prompt_len)] + [(prompt_len + n, 1) for n in range(5)]


def test_preemption_does_not_change_the_output() -> None:
    engine, _ = build_engine(num_kv_blocks=8, max_num_batched_tokens=9)
    for name in "abcdef":
        add(engine, name, 5, max_tokens=12)
    num_preempted = 0
    step = engine.step

    def counted(isolate_request_id: str | None = None) -> StepOutput:
        nonlocal num_preempted
        output = step(isolate_request_id)
        num_preempted += output.report.num_preempted
        return output

    engine.step = counted  # type: ignore[method-assign]

    result = run(engine)

    assert result == {name: (list(range(100, 112)), words(range(100, 112)), "length") for name in "abcdef"}
    assert num_preempted


def test_a_resumed_request_continues_and_repeats_no_text() -> None:
    engine, runner = build_engine()
    params = SamplingParams(max_tokens=5)
    engine.add(
        EngineRequest("a", [1, 2, 3], params, arrival_time=0.0, resumed=(ResumedOutput(0, (100, 101)),))
    )

    assert run(engine) == {"a": ([102, 103, 104], words([102, 103, 104]), "length")}
    assert runner.steps[0] == [("a", 0, 5)]


@pytest.mark.parametrize(
    ("output", "params", "end"),
    [
        ([100, 101], {"max_tokens": 2}, "length"),
        ([100, EOS], {"max_tokens": 9}, "stop"),
        ([100, 101], {"max_tokens": 9, "stop": ("101",)}, "stop"),
    ],
)
def test_a_resumed_request_that_was_complete_only_finishes(
    output: list[int], params: dict[str, Any], end: str
) -> None:
    engine, runner = build_engine()
    engine.add(
        EngineRequest(
            "a", [1], SamplingParams(**params), arrival_time=0.0, resumed=(ResumedOutput(0, tuple(output)),)
        )
    )

    assert run(engine) == {"a": ([], "", end)}
    assert runner.steps == []


def test_text_held_at_a_crash_is_reported_by_the_next_engine() -> None:
    engine, _ = build_engine()
    params = SamplingParams(max_tokens=2, stop=("<100><7",))
    engine.add(EngineRequest("a", [1], params, arrival_time=0.0, resumed=(ResumedOutput(0, (100,)),)))

    assert run(engine) == {"a": ([101], "<100><101>", "length")}


def test_resumed_tokens_beyond_the_limit_finish_and_repeat_no_text() -> None:
    engine, _ = build_engine(max_model_len=6)
    tokens = (100, 101, 102, 103, 104, 105, 106)
    # The fifth token reaches this engine's limit; the text held there was reported with the sixth.
    engine.add(
        EngineRequest(
            "a", [1], SamplingParams(stop=("<104><9",)), arrival_time=0.0, resumed=(ResumedOutput(0, tokens),)
        )
    )

    assert run(engine) == {"a": ([], "", "length")}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancel_finishes_exactly_one_request_in_every_state(steps: int) -> None:
    engine, _ = build_engine(max_num_batched_tokens=4)
    add(engine, "other", 2, max_tokens=6)
    add(engine, "a", 9, max_tokens=6)
    for _ in range(steps):
        engine.step()

    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert not engine.cancel("unknown")

    result = run(engine)
    assert result["a"][2] == "cancelled"
    assert result["other"][2] == "length"
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_a_discarded_request_reports_nothing() -> None:
    engine, _ = build_engine()
    add(engine, "a", 3, max_tokens=4)
    add(engine, "b", 3, max_tokens=4)
    engine.step()

    assert engine.discard("a")
    assert not engine.discard("a")

    reports = [engine.step().report for _ in range(4)]
    assert [one.reason for report in reports for one in report.finished] == ["length"]
    assert not engine.has_work


def test_a_request_that_never_fits_is_refused_and_the_next_is_served() -> None:
    """vllm#35541: with 8 blocks, a prompt of 40 tokens blocked the queue."""
    engine, _ = build_engine(num_kv_blocks=8)

    with pytest.raises(NeverFits, match="32"):
        add(engine, "big", 40)
    add(engine, "small", 3, max_tokens=2)

    assert run(engine) == {"small": ([100, 101], words([100, 101]), "length")}
