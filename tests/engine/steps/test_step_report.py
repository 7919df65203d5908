"""Step reports and queue positions: each event once, nothing stale."""

import pytest

from engine.outputs import FinishedRequest, ResumedOutput, Waited, WaitingReason
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.fakes import Clock, add, build_engine


def test_queue_positions_have_tokens_ahead_and_a_reason() -> None:
    engine, _ = build_engine(max_num_seqs=1)
    add(engine, "a", 4, max_tokens=9)
    add(engine, "b", 5, max_tokens=3)
    add(engine, "c", 6, max_tokens=3)
    engine.step()

    reported = [
        (one.request_id, one.position, one.tokens_ahead, one.reason) for one in engine.queue_positions()
    ]
    assert reported == [("b", 1, 9, WaitingReason.SEQ_BUDGET), ("c", 2, 17, WaitingReason.BEHIND)]


def test_a_report_counts_each_event_once() -> None:
    """vllm#31503, vllm#15167: finishes and first tokens were counted apart from their tokens."""
    clock = Clock()
    engine, runner = build_engine(clock=clock, max_num_batched_tokens=4)

    def tick(_: object) -> None:
        clock.now += 1.0

    runner.fault = tick
    add(engine, "chunked", 10, max_tokens=3)
    add(engine, "short", 2, max_tokens=1)
    add(engine, "gone", 2, max_tokens=1)
    engine.cancel("gone")

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    first_tokens = [wait.seconds for one in reports for wait in one.first_token_seconds]
    assert first_tokens == [1.0, 3.0], "a short prompt beside a chunk, and a prompt of three chunks"
    assert [s for one in reports for s in one.inter_token_seconds] == [1.0, 1.0]
    finished = {one.num_prompt_tokens: one for report in reports for one in report.finished}
    assert {one.reason for report in reports for one in report.finished} == {"length", "cancelled"}
    assert finished[10] == FinishedRequest(
        reason="length",
        num_prompt_tokens=10,
        num_output_tokens=3,
        num_preemptions=0,
        seconds=5.0,
        first_token_seconds=3.0,
    )
    assert sum(one.num_generated_tokens for one in reports) == 4
    assert sum(one.num_prefill_tokens for one in reports) == 12
    assert sum(one.num_decode_tokens for one in reports) == 2


def test_a_resumed_request_reports_no_second_queue_or_first_token_time() -> None:
    engine, _ = build_engine()
    engine.add(
        EngineRequest(
            "a", [1, 2], SamplingParams(max_tokens=4), arrival_time=0.0, resumed=(ResumedOutput(0, (100,)),)
        )
    )

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    assert [one for report in reports for one in report.first_token_seconds] == []
    assert [one for report in reports for one in report.queue_seconds] == []
    assert sum(len(report.inter_token_seconds) for report in reports) == 2
    (finished,) = reports[-1].finished
    assert (finished.first_token_seconds, finished.num_output_tokens) == (None, 4)


@pytest.mark.parametrize(("caches", "num_cached"), [(True, 8), (False, 0)])
@pytest.mark.parametrize("n", [1, 2])
def test_a_resumed_request_starts_if_its_whole_prompt_is_cached(
    caches: bool, num_cached: int, n: int
) -> None:
    """Its first step is a decode then, among decodes of requests that started before."""
    engine, _ = build_engine(prefix_caching=caches)
    add(engine, "beside", 3, max_tokens=30)
    prompt = list(range(1, 9))
    engine.add(EngineRequest("before", prompt, SamplingParams(max_tokens=1), arrival_time=1.0))
    assert set(engine.step().started) == {"beside", "before"}
    resumed = tuple(ResumedOutput(index, (100,)) for index in range(n))
    engine.add(
        EngineRequest("a", prompt, SamplingParams(max_tokens=4, n=n), arrival_time=2.0, resumed=resumed)
    )

    steps = [engine.step() for _ in range(6)]

    assert [step.started for step in steps] == [("a",), *[()] * 5]
    assert (steps[0].report.num_prefill_tokens == 0) == caches
    ends = [one for step in steps for one in step.outputs if one.finish_reason and one.request_id == "a"]
    assert [one.num_cached_tokens for one in ends] == [num_cached] * n


def test_time_before_the_engine_counts_as_queue_time() -> None:
    engine, _ = build_engine()
    engine.add(
        EngineRequest(
            "a", [1], SamplingParams(max_tokens=1), priority=3, arrival_time=0.0, waited_seconds=5.0
        )
    )

    report = engine.step().report

    assert report.queue_seconds == report.first_token_seconds == (Waited(3, 5.0),)
    assert report.finished[0].seconds == 5.0


def test_queue_time_does_not_include_the_first_step() -> None:
    clock = Clock()
    engine, runner = build_engine(clock=clock, max_num_batched_tokens=4)

    def tick(_: object) -> None:
        clock.now += 2.0

    runner.fault = tick
    add(engine, "a", 10, max_tokens=1)
    add(engine, "b", 3, max_tokens=1)
    clock.now = 1.0

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    assert [one.queue_seconds for one in reports] == [((2, 1.0), (2, 1.0)), (), (), ()]
    assert [one.first_token_seconds for one in reports] == [(), ((2, 5.0),), (), ((2, 9.0),)]
    assert [one.seconds_since_decision for one in reports] == [2.0] * 4


def test_cancelling_everything_leaves_an_empty_report() -> None:
    """vllm#22545: gauges kept their last values when everything had been aborted."""
    engine, _ = build_engine()
    for name in "abcdef":
        add(engine, name, 3)
    engine.step()
    for name in "abcdef":
        engine.cancel(name)

    report = engine.step().report

    assert not engine.has_work
    assert (report.num_running, report.num_waiting) == (0, 0)
    assert report.num_free_kv_blocks == report.num_kv_blocks
    assert [one.reason for one in report.finished] == ["cancelled"] * 6


def test_recomputed_tokens_are_those_lost_to_preemption() -> None:
    engine, _ = build_engine(num_kv_blocks=3, prefix_caching=False)
    add(engine, "old", 4, max_tokens=5)
    add(engine, "young", 3, max_tokens=5)

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    assert sum(report.num_preempted for report in reports) == 1
    lost = next(n for n, report in enumerate(reports) if report.num_preempted)
    # Each earlier step computed the prompt or one more token of the young request.
    assert sum(report.num_recomputed_tokens for report in reports) == 3 + lost - 1
