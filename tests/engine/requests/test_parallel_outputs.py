"""Requests with n outputs: all share one prompt, each finishes once, and a fault fails one."""

from collections import Counter

import pytest

from engine.engine import Engine
from engine.errors import InvalidParameter, NeverFits
from engine.outputs import (
    ResumedOutput,
    SampledToken,
    SchedulerOutputs,
    SequenceOutput,
    StepReport,
    WaitingReason,
)
from engine.requests.engine_request import EngineRequest
from engine.requests.parallel_outputs import params_of_output
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from tests.engine.fakes import EOS, ScriptedRunner, add, build_engine, run, words


class SeededRunner(ScriptedRunner):
    """Samples by seed and position."""

    def sample_token(self, sequence: Sequence, index: int) -> SampledToken:
        return SampledToken(hash((sequence.params.seed, index)) % 500)


def computed(runner: ScriptedRunner, request_id: str) -> list[tuple[int, int]]:
    return [(start, n) for step in runner.steps for who, start, n in step if who == request_id]


def fail_in_forward_pass(runner: ScriptedRunner, request_id: str, index: int) -> None:
    def fault(outputs: SchedulerOutputs) -> None:
        if any((s.request_id, s.index) == (request_id, index) for s in sequences(outputs)):
            raise ValueError("bad")

    runner.fault = fault


def sequences(outputs: SchedulerOutputs) -> list[Sequence]:
    return [item.sequence for item in outputs.scheduled]


def run_all(engine: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def test_n_outputs_have_different_texts_and_finish_once_each() -> None:
    """vllm#10852, vllm#52398: n outputs were equal, or fewer than n were returned."""
    results = []
    for _ in range(2):
        engine, _ = build_engine(SeededRunner())
        add(engine, "a", 5, n=4, seed=3, max_tokens=6)
        results.append(run(engine))
    engine, _ = build_engine(SeededRunner())
    add(engine, "a", 5, seed=3, max_tokens=6)
    alone = run(engine)

    assert results[0] == results[1]
    assert set(results[0]) == {"a", "a/1", "a/2", "a/3"}
    assert len({tuple(tokens) for tokens, _, _ in results[0].values()}) == 4
    assert all(end == "length" for _, _, end in results[0].values())
    assert results[0]["a"] == alone["a"], "the first output is that of the request with n=1"


@pytest.mark.parametrize("seed", [0, 3, -1, 2**64 - 1])
def test_seeds_differ_between_outputs_and_neighbouring_requests(seed: int) -> None:
    engine, runner = build_engine(max_num_seqs=64, num_kv_blocks=300)
    add(engine, "a", 5, n=32, seed=seed, max_tokens=1)
    other = seed - 1 if seed > 0 else seed + 1
    add(engine, "b", 5, n=32, seed=other, max_tokens=1)
    seeds: Counter[int] = Counter()
    runner.sample_fault = lambda sequence: seeds.update([sequence.params.seed])

    run(engine)

    assert len(seeds) == 64
    assert all(-(2**63) <= one < 2**64 for one in seeds)


def test_parameters_are_checked_once_for_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output has its own parameters: checking 262,144 allowed ids for 128 outputs would take seconds."""
    params = SamplingParams(n=128, allowed_token_ids=(1, 2), prompt_logprobs=1)
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda _: pytest.fail("checked again"))
    varied = [params_of_output(params, index) for index in range(params.n)]

    assert len({one.seed for one in varied}) == params.n
    assert {one.prompt_logprobs for one in varied} == {None}
    assert params.prompt_logprobs == 1
    assert all(one.allowed_token_ids is params.allowed_token_ids for one in varied)


def test_followers_wait_for_the_prompt_and_compute_only_its_tail() -> None:
    engine, runner = build_engine(max_num_batched_tokens=4)
    add(engine, "a", 9, n=3, max_tokens=2)

    for _ in range(2):
        engine.step()
        positions = engine.queue_positions()
        assert [(one.request_id, one.index, one.reason) for one in positions] == [
            ("a", 1, WaitingReason.SIBLING),
            ("a", 2, WaitingReason.SIBLING),
        ]
        assert engine.num_waiting == 2
    result = run(engine)

    assert computed(runner, "a")[:3] == [(0, 4), (4, 4), (8, 1)], "no follower before the prompt is computed"
    assert Counter(computed(runner, "a")[3:]) == Counter({(8, 1): 2, (9, 1): 3}), "found in the cache"
    assert {name: tokens for name, (tokens, _, _) in result.items()} == {
        name: [100, 101] for name in ("a", "a/1", "a/2")
    }


def test_the_prompt_is_shared_within_a_request_without_prefix_caching() -> None:
    engine, runner = build_engine(prefix_caching=False)
    engine.add(EngineRequest("a", list(range(1, 10)), SamplingParams(max_tokens=2, n=3), arrival_time=0.0))
    run(engine)
    engine.add(EngineRequest("b", list(range(1, 10)), SamplingParams(max_tokens=2, n=2), arrival_time=1.0))
    run(engine)

    for request_id, n in (("a", 3), ("b", 2)):
        counts = Counter(computed(runner, request_id))
        assert counts == {(0, 9): 1, (8, 1): n - 1, (9, 1): n}, "the prompt is not shared between requests"


def test_a_leader_that_finishes_at_its_first_token_releases_the_others() -> None:
    engine, runner = build_engine(ScriptedRunner({"a/0": [EOS]}))
    add(engine, "a", 9, n=3, max_tokens=2)

    result = run(engine)

    assert [end for _, _, end in result.values()] == ["stop", "length", "length"]
    assert computed(runner, "a")[:3] == [(0, 9), (8, 1), (8, 1)]


def test_a_leader_that_fails_during_prefill_is_replaced() -> None:
    engine, runner = build_engine(max_num_batched_tokens=4)
    add(engine, "a", 9, n=3, max_tokens=2)
    fail_in_forward_pass(runner, "a", 0)

    (failed,) = engine.step().outputs
    assert (failed.index, failed.finish_reason, failed.error) == (0, FinishReason.ERROR, "ValueError: bad")
    runner.steps.clear()
    result = run(engine)

    assert result == {name: ([100, 101], words([100, 101]), "length") for name in ("a/1", "a/2")}
    assert computed(runner, "a")[:3] == [(0, 4), (4, 4), (8, 1)], "the third waits for the second"


def test_blocks_of_a_failed_leader_are_not_shared() -> None:
    """Its prompt was computed but may be invalid: the next leader computes it again."""
    engine, runner = build_engine()

    def fault(sequence: Sequence) -> None:
        if sequence.index == 0:
            raise ValueError("bad")

    runner.sample_fault = fault
    add(engine, "a", 9, n=3, max_tokens=2)

    result = run(engine)

    assert [end for _, _, end in result.values()] == ["error", "length", "length"]
    assert runner.steps[:2] == [[("a", 0, 9)], [("a", 0, 9)]]
    assert ("a", 8, 1) in runner.steps[2], "the third output finds the blocks of the second"


def test_a_fault_of_one_output_fails_only_that_output() -> None:
    engine, runner = build_engine()

    def fault(sequence: Sequence) -> None:
        if sequence.index == 1 and sequence.num_output_tokens == 1:
            raise ValueError("bad")

    runner.sample_fault = fault
    add(engine, "a", 5, n=3, max_tokens=3)

    result = run(engine)

    assert result["a/1"] == ([100], "<100>", "error")
    assert result["a"] == result["a/2"] == ([100, 101, 102], words([100, 101, 102]), "length")


def test_a_cancel_finishes_only_unfinished_outputs() -> None:
    engine, _ = build_engine(ScriptedRunner({"a/1": [100, EOS]}), max_num_seqs=2)
    add(engine, "a", 5, n=4, max_tokens=9)
    while not any(output.finish_reason for output in engine.step().outputs):
        pass

    assert engine.cancel("a")
    assert not engine.cancel("a")

    step = engine.step()
    assert [(one.index, one.finish_reason) for one in step.outputs] == [
        (index, FinishReason.CANCELLED) for index in (0, 2, 3)
    ]
    assert len(step.report.finished) == 1
    assert not engine.has_work
    assert engine.scheduler.block_manager.num_free_blocks == 16


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_discarded_request_leaves_no_state(steps: int) -> None:
    engine, _ = build_engine(max_num_batched_tokens=6)
    add(engine, "a", 9, n=3, max_tokens=9)
    add(engine, "b", 3, n=2, max_tokens=4)
    for _ in range(steps):
        engine.step()
    engine.cancel("b")

    assert engine.discard("a")
    assert not engine.discard("a")

    reported = run_all(engine)
    assert {output.request_id for output in reported} == {"b"}
    assert engine.scheduler.block_manager.num_free_blocks == 16
    assert engine.num_tracked == 0
    add(engine, "a", 3, n=2, max_tokens=1)
    assert set(run(engine)) == {"a", "a/1"}, "its id is free again"


def test_each_output_resumes_at_its_position() -> None:
    engine, runner = build_engine()
    resumed = (
        ResumedOutput(0, (100, EOS), FinishReason.STOP),
        ResumedOutput(1, (100, 101)),
        ResumedOutput(3, (100, 101, 102)),
    )
    add(engine, "a", 5, n=4, max_tokens=3, resumed=resumed)

    reported = run_all(engine)

    tokens = {index: [one.token_id for one in reported if one.index == index] for index in range(4)}
    assert tokens == {0: [], 1: [102], 2: [100, 101, 102], 3: [None]}
    assert sorted(one.index for one in reported if one.finish_reason) == [1, 2, 3]
    assert computed(runner, "a")[0] == (0, 7), "the second computes the prompt for all"


def test_a_resumed_request_counts_earlier_tokens_once() -> None:
    engine, _ = build_engine()
    resumed = (ResumedOutput(0, (100, EOS), FinishReason.STOP), ResumedOutput(1, (100,)))
    add(engine, "a", 5, n=2, max_tokens=3, resumed=resumed)

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    (finished,) = [one for report in reports for one in report.finished]
    assert finished.num_output_tokens == 2 + 3
    assert sum(report.num_generated_tokens for report in reports) == 2


@pytest.mark.parametrize(
    "resumed",
    [
        (ResumedOutput(2, (1,)),),
        (ResumedOutput(0, (1,)), ResumedOutput(0, (2,))),
        (ResumedOutput(0, (1,), FinishReason.STOP), ResumedOutput(1, (1,), FinishReason.LENGTH)),
    ],
)
def test_invalid_resumed_outputs_are_refused(resumed: tuple[ResumedOutput, ...]) -> None:
    engine, _ = build_engine()

    with pytest.raises(InvalidParameter, match="resumed"):
        add(engine, "a", 3, n=2, resumed=resumed)

    assert not engine.has_work


def test_a_request_with_an_output_that_cannot_fit_is_refused() -> None:
    engine, _ = build_engine(chunked_prefill=False, max_num_batched_tokens=8)

    with pytest.raises(NeverFits):
        # A resumed output may be recomputed in chunks; the other output has not begun.
        add(engine, "a", 9, n=2, resumed=(ResumedOutput(0, (100,)),))

    assert not engine.has_work
    assert engine.num_waiting == 0


def test_a_report_counts_a_request_once_and_all_of_its_tokens() -> None:
    """vllm#31503: finishes and tokens were counted in different places, and the sums differed."""
    engine, runner = build_engine(ScriptedRunner({"a/1": [EOS]}))
    add(engine, "a", 5, n=3, max_tokens=4)
    add(engine, "b", 5, n=2, max_tokens=4)
    add(engine, "c", 5, max_tokens=4)
    engine.cancel("b")

    def fault(sequence: Sequence) -> None:
        if sequence.request_id == "a" and sequence.index == 2 and sequence.num_output_tokens:
            raise ValueError("bad")

    runner.sample_fault = fault
    reports: list[StepReport] = []
    started: list[str] = []
    while engine.has_work:
        step = engine.step()
        reports.append(step.report)
        started += step.started

    finished = [one for report in reports for one in report.finished]
    assert Counter(one.reason for one in finished) == {"error": 1, "cancelled": 1, "length": 1}
    assert sum(one.num_output_tokens for one in finished) == 4 + 1 + 1 + 4
    assert sum(report.num_generated_tokens for report in reports) == 4 + 1 + 1 + 4
    assert sum(one.num_prompt_tokens for one in finished) == 15
    assert sum(len(report.first_token_seconds) for report in reports) == 2
    assert sum(len(report.queue_seconds) for report in reports) == 2
    assert sorted(started) == ["a", "c"]


def test_prefix_hits_among_outputs_are_not_reported_as_cached() -> None:
    engine, _ = build_engine()
    prompt = list(range(1, 10))
    engine.add(EngineRequest("first", prompt, SamplingParams(max_tokens=1), arrival_time=0.0))
    engine.step()
    engine.add(
        EngineRequest("a", [*prompt[:5], 7, 7, 7, 7], SamplingParams(max_tokens=1, n=3), arrival_time=1.0)
    )

    ends = [output for output in run_all(engine) if output.finish_reason]

    assert {one.num_cached_tokens for one in ends if one.request_id == "a"} == {4}


def test_prompt_logprobs_are_reported_once_with_the_first_token() -> None:
    engine, runner = build_engine(max_num_batched_tokens=4)
    add(engine, "a", 9, n=3, max_tokens=2, prompt_logprobs=1, logprobs=0)

    reported = run_all(engine)

    with_prompt = [one for one in reported if one.prompt_logprobs is not None]
    assert with_prompt == [next(one for one in reported if one.token_id is not None)]
    assert with_prompt[0].index == 0
    first, *others = with_prompt[0].prompt_logprobs or ()
    assert first is None
    assert [one.logprob for one in others if one] == [-float(n) for n in range(1, 9)]
    assert computed(runner, "a").count((8, 1)) == 3, "the others need not compute the prompt for them"
    tokens = [(one.token_id, one.logprobs.logprob) for one in reported if one.index == 2 and one.logprobs]
    assert tokens == [(100, 0.0), (101, -1.0)]


def test_prompt_logprobs_come_from_the_output_that_computed_the_prompt() -> None:
    engine, runner = build_engine(max_num_batched_tokens=4)
    add(engine, "a", 9, n=2, max_tokens=1, prompt_logprobs=0)
    engine.step()
    fail_in_forward_pass(runner, "a", 0)

    reported = run_all(engine)

    (logprobs,) = [one.prompt_logprobs for one in reported if one.prompt_logprobs]
    assert len(logprobs) == 9


def test_prompt_logprobs_are_not_repeated_after_a_resume() -> None:
    engine, _ = build_engine()
    add(engine, "a", 5, n=2, max_tokens=3, prompt_logprobs=0, resumed=(ResumedOutput(1, (100,)),))
    add(engine, "b", 5, max_tokens=3, prompt_logprobs=0, resumed=(ResumedOutput(0, ()),))

    reported = run_all(engine)

    assert [one.request_id for one in reported if one.prompt_logprobs] == ["b"]
