"""The loop turn by turn, with a scripted engine and without threads or Redis."""

import pytest

from engine.errors import EngineDead, InvalidParameter, NeverFits
from engine.outputs import StepReport
from tests.worker.loop_bench import A, B, Bench
from worker.inbox import Cancel, Discard
from worker.loop import Load
from worker.ownership import Ownership


def test_a_turn_handles_messages_steps_and_passes_results_on() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.arrive(B)
    bench.loop.turn()

    assert bench.engine.calls == [("add", "a:o1"), ("add", "b:o2"), ("step", "a:o1,b:o2")]
    assert [output.request_id for output in bench.sink.steps[0].outputs] == ["a:o1", "b:o2"]
    assert bench.loop.load == Load(num_running=2)
    assert bench.wake.is_set(), "started requests leave room for claims"


def test_messages_are_handled_in_order() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.inbox.put(Cancel(A))
    bench.arrive(B)
    bench.inbox.put(Discard(B))
    bench.loop.turn()

    assert [call for call in bench.engine.calls if call[0] != "step"] == [
        ("add", "a:o1"),
        ("cancel", "a:o1"),
        ("add", "b:o2"),
        ("discard", "b:o2"),
    ]


def test_a_task_lost_before_it_is_added_is_not_started() -> None:
    """rq#2160: a cancel arrived before the start."""
    bench = Bench()
    bench.arrive(A)
    bench.owned_tasks.drop(A)
    bench.inbox.put(Cancel(A))
    bench.loop.turn()

    assert bench.engine.calls == [("cancel", "a:o1")]


def test_a_task_claimed_again_is_a_new_request() -> None:
    """A late discard of the earlier attempt does not affect the new one."""
    bench = Bench()
    again = Ownership("a", "o9")
    bench.arrive(A)
    bench.loop.turn()
    bench.arrive(again)
    bench.inbox.put(Discard(A))
    bench.loop.turn()

    assert bench.engine.live == ["a:o9"]
    assert again in bench.owned_tasks


@pytest.mark.parametrize(
    ("refusal", "param", "code", "message"),
    [
        (NeverFits("prompt", "too long"), "messages", "context_length_exceeded", "messages: too long"),
        (
            InvalidParameter("stop_token_ids", "no such id"),
            "stop_token_ids",
            "invalid_value",
            "stop_token_ids: no such id",
        ),
    ],
)
def test_a_refused_request_fails_with_the_clients_field(
    refusal: Exception, param: str, code: str, message: str
) -> None:
    bench = Bench()
    bench.engine.add_error = refusal
    bench.arrive(A, prompt_field="messages")
    bench.loop.turn()

    failed = bench.sink.failed["a:o1"]
    assert (failed.param, failed.code, failed.message) == (param, code, message)


def test_an_unexpected_error_in_add_fails_only_that_request() -> None:
    bench = Bench()
    bench.engine.add_error = RuntimeError("what?")
    bench.arrive(A)
    bench.loop.turn()
    bench.engine.add_error = None
    bench.arrive(B)
    bench.loop.turn()

    assert bench.sink.failed["a:o1"].code == "internal_error"
    assert bench.engine.live == ["b:o2"]


def test_a_full_sink_stops_steps_but_not_ticks() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.sink.is_full = True
    for second in range(100):
        bench.now = float(second)
        bench.loop.turn()

    assert ("step", "a:o1") not in bench.engine.calls
    assert bench.sink.num_waits == 100
    assert not bench.watchdog.is_stalled
    bench.inbox.put(Cancel(A))
    bench.loop.turn()
    assert bench.engine.calls[-1] == ("cancel", "a:o1"), "messages are still handled"


def test_the_watchdog_is_armed_once_a_second() -> None:
    bench = Bench()
    bench.arrive(A)
    for turn in range(100):
        bench.now = turn / 25
        bench.loop.turn()

    assert bench.armed == [61.0] * 4


def test_ticks_do_not_postpone_the_end_of_the_process() -> None:
    """docling-jobkit#102: a worker that was to end kept hanging."""
    bench = Bench()
    bench.loop.turn()
    bench.watchdog.end_within(14.0)
    for second in range(1, 100):
        bench.now = float(second)
        bench.loop.turn()

    assert bench.armed == [61.0, 14.0]


def test_a_loop_without_turns_is_stalled() -> None:
    bench = Bench()
    bench.now = 60.0
    assert not bench.watchdog.is_stalled
    bench.now = 60.1
    assert bench.watchdog.is_stalled


def test_a_failing_observer_is_logged_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def observe(self, report: StepReport) -> None:
            raise ValueError("no such label")

    class Counting:
        num = 0

        def observe(self, report: StepReport) -> None:
            self.num += 1

    counting = Counting()
    bench = Bench(Broken(), counting)
    bench.arrive(A)
    for _ in range(5):
        bench.loop.turn()

    assert counting.num == 5
    assert bench.metrics.value("observer_errors_total") == 5
    assert caplog.text.count("an observer failed") == 1


def test_queue_positions_are_reported_twice_a_second() -> None:
    bench = Bench()
    bench.engine.num_waiting = 1
    bench.arrive(A)
    for turn in range(100):
        bench.now = 1 + turn / 50
        bench.loop.turn()

    assert len(bench.sink.positions) == 4


def test_an_empty_queue_is_reported_once() -> None:
    bench = Bench()
    bench.engine.num_waiting = 1
    bench.arrive(A)
    bench.loop.turn()
    bench.engine.num_waiting = 0
    for second in range(1, 5):
        bench.now = float(second)
        bench.loop.turn()

    assert [len(positions) for positions in bench.sink.positions] == [1, 0]


def test_observers_see_an_idle_engine_after_a_discard() -> None:
    """xllm PR829: gauges kept the numbers of requests that were gone."""
    bench = Bench()
    bench.arrive(A)
    bench.loop.turn()
    bench.inbox.put(Discard(A))
    bench.loop.turn()

    assert bench.engine.calls[-1] == ("step", "")
    assert bench.loop.load == Load()


def test_a_dead_engine_ends_the_loop() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.engine.fault = EngineDead("gone")

    with pytest.raises(EngineDead):
        bench.loop.turn()
