"""Deadlines finish overdue requests, and cost the others nothing."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.outputs import ResumedOutput, SequenceOutput, StepOutput
from engine.requests.deadlines import DeadlineHeap, Deadlines, Limit
from engine.sequence import FinishReason
from tests.engine.fakes import Clock, ScriptedRunner, add, build_engine, run


@dataclass(eq=False)
class Examined:
    """A request that counts how often it is examined."""

    met: set[Limit] = field(default_factory=set)
    num_examined: int = 0

    def is_subject_to(self, limit: Limit) -> bool:
        self.num_examined += 1
        return limit not in self.met


def timeouts(step: StepOutput) -> list[tuple[str, int, str | None]]:
    return [
        (one.request_id, one.index, one.error)
        for one in step.outputs
        if one.finish_reason is FinishReason.TIMEOUT
    ]


def step_at(engine: Engine, clock: Clock, now: float) -> StepOutput:
    clock.now = now
    return engine.step()


def test_a_request_not_started_in_time_times_out_and_the_running_one_continues() -> None:
    clock = Clock()
    engine, runner = build_engine(clock=clock, max_num_seqs=1)
    limits = Deadlines(queue_timeout_seconds=5)
    add(engine, "runs", 3, max_tokens=9, deadlines=limits)
    add(engine, "waits", 3, deadlines=limits)
    engine.step()

    assert timeouts(step_at(engine, clock, 4.9)) == []
    step = step_at(engine, clock, 5.0)

    assert timeouts(step) == [("waits", 0, "not started within queue_timeout_seconds (5 s)")]
    assert step.report.num_waiting == 0
    assert run(engine)["runs"][2] == "length"
    assert all(who == "runs" for computed in runner.steps for who, _, _ in computed)


def test_a_long_prefill_misses_the_first_token_deadline() -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock, max_num_batched_tokens=4)
    add(engine, "a", 40, max_tokens=3, deadlines=Deadlines(queue_timeout_seconds=1, ttft_timeout_seconds=2.5))
    engine.step()

    assert timeouts(step_at(engine, clock, 2.0)) == []
    assert timeouts(step_at(engine, clock, 2.5)) == [("a", 0, "no token within ttft_timeout_seconds (2.5 s)")]
    assert not engine.has_work
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_a_timeout_keeps_the_generated_text_and_releases_held_text() -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock)
    limits = Deadlines(ttft_timeout_seconds=1, timeout_seconds=3)
    add(engine, "a", 3, stop=("<101><9",), deadlines=limits)
    first = engine.step().outputs + engine.step().outputs

    (end,) = step_at(engine, clock, 3.0).outputs

    assert "".join(one.text for one in first) == "<100>"
    assert end == SequenceOutput(
        request_id="a",
        held_text="<101>",
        finish_reason=FinishReason.TIMEOUT,
        error="not done within timeout_seconds (3 s)",
    )


def test_a_request_overdue_on_arrival_times_out_without_being_computed() -> None:
    engine, runner = build_engine()
    add(engine, "a", 3, deadlines=Deadlines(queue_timeout_seconds=5), waited_seconds=5)
    add(engine, "b", 3, deadlines=Deadlines(timeout_seconds=0))

    assert engine.has_work
    assert [who for who, _, _ in timeouts(engine.step())] == ["a", "b"]
    assert runner.steps == []


def test_deadlines_count_from_acceptance() -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock)
    add(engine, "a", 3, deadlines=Deadlines(timeout_seconds=60), waited_seconds=50)
    engine.step()

    assert timeouts(step_at(engine, clock, 9.0)) == []
    assert timeouts(step_at(engine, clock, 10.0)) == [("a", 0, "not done within timeout_seconds (60 s)")]


def test_a_timeout_finishes_each_unfinished_output_and_counts_once() -> None:
    clock = Clock()
    engine, _ = build_engine(ScriptedRunner({"a/0": [999]}), clock, max_num_seqs=2)
    add(engine, "a", 3, n=4, deadlines=Deadlines(timeout_seconds=2))
    engine.step()
    engine.step()

    step = step_at(engine, clock, 2.0)

    assert [index for _, index, _ in timeouts(step)] == [1, 2, 3]
    assert [one.reason for one in step.report.finished] == ["timeout"]


def test_a_resumed_request_has_met_its_queue_and_first_token_deadlines() -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock, max_num_seqs=1)
    limits = Deadlines(queue_timeout_seconds=5, ttft_timeout_seconds=5, timeout_seconds=100)
    add(engine, "a", 3, deadlines=limits, resumed=(ResumedOutput(0, (100,)),), waited_seconds=50)

    assert timeouts(engine.step()) == []
    assert timeouts(step_at(engine, clock, 50.0)) == [("a", 0, "not done within timeout_seconds (100 s)")]


def test_a_preempted_request_has_met_its_queue_deadline() -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock, num_kv_blocks=3, prefix_caching=False)
    add(engine, "old", 4, max_tokens=5)
    add(engine, "young", 3, max_tokens=5, deadlines=Deadlines(queue_timeout_seconds=5))
    while not engine.step().report.num_preempted:
        pass

    clock.now = 6.0

    assert run(engine)["young"][2] == "length"


def test_the_earliest_of_several_missed_deadlines_is_reported() -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock)
    add(
        engine,
        "a",
        3,
        deadlines=Deadlines(queue_timeout_seconds=3, ttft_timeout_seconds=2, timeout_seconds=1),
    )

    assert timeouts(step_at(engine, clock, 9.0)) == [("a", 0, "not done within timeout_seconds (1 s)")]


def test_only_expired_deadlines_are_examined() -> None:
    heap = DeadlineHeap[Examined]()
    requests = [Examined() for _ in range(100_000)]
    for request in requests:
        heap.add(request, 0.0, Deadlines(queue_timeout_seconds=10))
    before = sum(request.num_examined for request in requests)

    assert heap.pop_expired(9.0) == []
    assert sum(request.num_examined for request in requests) == before
    assert before < 4 * len(requests), "few are examined while requests are added"


def test_finished_requests_leave_the_heap() -> None:
    heap = DeadlineHeap[Examined]()
    for _ in range(5_000):
        request = Examined()
        heap.add(request, 0.0, Deadlines(timeout_seconds=86400))
        request.met.add(Limit.TOTAL)

    assert len(heap) < 200


@given(
    st.lists(st.tuples(*[st.one_of(st.none(), st.integers(0, 6))] * 3, st.sets(st.sampled_from(Limit)))),
    st.lists(st.integers(0, 6)),
)
def test_expired_requests_are_those_with_an_unmet_past_deadline(
    requests_drawn: list[tuple[int | None, int | None, int | None, set[Limit]]], moments: list[int]
) -> None:
    heap = DeadlineHeap[Examined]()
    requests: list[tuple[Examined, dict[Limit, int | None]]] = []
    for queue, ttft, total, met in requests_drawn:
        request = Examined()
        limits = Deadlines(queue_timeout_seconds=queue, ttft_timeout_seconds=ttft, timeout_seconds=total)
        heap.add(request, 0.0, limits)
        request.met = met
        requests.append((request, {Limit.QUEUE: queue, Limit.TTFT: ttft, Limit.TOTAL: total}))

    for now in sorted(moments):
        expired = [request for request, _ in heap.pop_expired(now)]
        expected = [
            request
            for request, limits in requests
            if any(
                when is not None and when <= now and one not in request.met for one, when in limits.items()
            )
        ]
        assert sorted(map(id, expired)) == sorted(map(id, expected))
        for request in expired:
            request.met = set(Limit)


@pytest.mark.parametrize("name", ["queue_timeout_seconds", "ttft_timeout_seconds", "timeout_seconds"])
def test_an_unset_limit_never_expires(name: str) -> None:
    clock = Clock()
    engine, _ = build_engine(clock=clock)
    add(engine, "a", 3, max_tokens=2, deadlines=Deadlines(**{name: None}))
    clock.now = 1e9

    assert run(engine)["a"][2] == "length"
