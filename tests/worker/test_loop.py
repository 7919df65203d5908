"""The loop, turn by turn: scripted engine, no threads, no Redis."""

import threading
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import WaitingSequence
from engine.errors import EngineDead, InvalidParameter, NeverFits
from engine.outputs import SequenceOutput, StepOutput, StepReport, WaitingReason
from engine.sampling_params import SamplingParams
from worker.inbox import Arrival, Cancel, Discard, Inbox
from worker.loop import Load, Loop
from worker.ownership import Holdings, Ownership
from worker.protocol.messages import TaskError
from worker.watching import Observers, Pulse

A, B = Ownership("a", "o1"), Ownership("b", "o2")


class ScriptedEngine:
    """Runs what it is given until told to end it."""

    config = EngineConfig(max_model_len=10, num_kv_blocks=10)

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.live: list[str] = []
        self.refusal: Exception | None = None
        self.fault: Exception | None = None
        self.num_waiting = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def num_running(self) -> int:
        return len(self.live)

    def add(self, request_id: str, *args: Any, **options: Any) -> None:
        if self.refusal:
            raise self.refusal
        self.calls.append(("add", request_id))
        self.live.append(request_id)

    def cancel(self, request_id: str) -> bool:
        self.calls.append(("cancel", request_id))
        return self._drop(request_id)

    def discard(self, request_id: str) -> bool:
        self.calls.append(("discard", request_id))
        return self._drop(request_id)

    def _drop(self, request_id: str) -> bool:
        found = request_id in self.live
        self.live = [one for one in self.live if one != request_id]
        return found

    def step(self) -> StepOutput:
        if self.fault:
            raise self.fault
        self.calls.append(("step", ",".join(self.live)))
        outputs = tuple(SequenceOutput(request_id=one, token_id=1) for one in self.live)
        return StepOutput(outputs=outputs, started=tuple(self.live), report=StepReport(step=len(self.calls)))

    def waiting(self) -> list[WaitingSequence]:
        one = WaitingSequence(request_id="w", position=1, tokens_ahead=3, reason=WaitingReason.TOKEN_BUDGET)
        return [one] * self.num_waiting


class Outlet:
    def __init__(self) -> None:
        self.is_full = False
        self.steps: list[StepOutput] = []
        self.lines: list[list[WaitingSequence]] = []
        self.failed: dict[str, TaskError] = {}
        self.num_waits = 0

    def hand(self, output: StepOutput) -> None:
        self.steps.append(output)

    def tell_waiting(self, line: list[WaitingSequence]) -> None:
        self.lines.append(line)

    def fail(self, request_id: str, error: TaskError) -> None:
        self.failed[request_id] = error

    def wait_for_room(self, seconds: float) -> None:
        self.num_waits += 1


class Bench:
    """A loop with everything around it in reach."""

    def __init__(self, *observers: Any) -> None:
        self.now = 0.0
        self.armed: list[float] = []
        self.num_observer_errors = 0
        self.engine, self.outlet, self.inbox = ScriptedEngine(), Outlet(), Inbox()
        self.wake = threading.Event()
        self.holdings = Holdings(self.wake)
        self.pulse = Pulse(60.0, self.clock, on_tick=lambda: None, arm=self.armed.append)
        self.loop = Loop(
            self.engine,
            self.inbox,
            self.outlet,
            self.holdings,
            observers=Observers(observers, self.count_error),
            pulse=self.pulse,
            clock=self.clock,
            wake=self.wake,
        )

    def clock(self) -> float:
        return self.now

    def count_error(self) -> None:
        self.num_observer_errors += 1

    def arrive(self, ownership: Ownership, prompt_field: str = "prompt") -> None:
        self.holdings.take(ownership)
        self.inbox.put(
            Arrival(
                ownership=ownership,
                prompt_token_ids=[1],
                params=SamplingParams(),
                accepted_at=1.0,
                prompt_field=prompt_field,
            )
        )


def test_a_turn_takes_what_came_steps_and_hands_on() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.arrive(B)
    bench.loop.turn()

    assert bench.engine.calls == [("add", "a:o1"), ("add", "b:o2"), ("step", "a:o1,b:o2")]
    assert [output.request_id for output in bench.outlet.steps[0].outputs] == ["a:o1", "b:o2"]
    assert bench.loop.load == Load(num_running=2)
    assert bench.wake.is_set(), "what was started leaves room for claims"


def test_messages_keep_their_order() -> None:
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


def test_what_was_lost_on_its_way_is_not_started() -> None:
    """rq#2160: the cancel came before the start."""
    bench = Bench()
    bench.arrive(A)
    bench.holdings.drop(A)
    bench.inbox.put(Cancel(A))
    bench.loop.turn()

    assert bench.engine.calls == [("cancel", "a:o1")]


def test_a_task_that_comes_back_is_a_new_request() -> None:
    """The late discard of its earlier attempt leaves the new one alone."""
    bench = Bench()
    again = Ownership("a", "o9")
    bench.arrive(A)
    bench.loop.turn()
    bench.arrive(again)
    bench.inbox.put(Discard(A))
    bench.loop.turn()

    assert bench.engine.live == ["a:o9"]
    assert again in bench.holdings


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
    bench.engine.refusal = refusal
    bench.arrive(A, prompt_field="messages")
    bench.loop.turn()

    failed = bench.outlet.failed["a:o1"]
    assert (failed.param, failed.code, failed.message) == (param, code, message)


def test_an_unexpected_error_in_add_fails_that_request_alone() -> None:
    bench = Bench()
    bench.engine.refusal = RuntimeError("what?")
    bench.arrive(A)
    bench.loop.turn()
    bench.engine.refusal = None
    bench.arrive(B)
    bench.loop.turn()

    assert bench.outlet.failed["a:o1"].code == "internal_error"
    assert bench.engine.live == ["b:o2"]


def test_a_full_outlet_stops_steps_but_not_ticks() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.outlet.is_full = True
    for second in range(100):
        bench.now = float(second)
        bench.loop.turn()

    assert ("step", "a:o1") not in bench.engine.calls
    assert bench.outlet.num_waits == 100
    assert not bench.pulse.is_stalled
    bench.inbox.put(Cancel(A))
    bench.loop.turn()
    assert bench.engine.calls[-1] == ("cancel", "a:o1"), "messages are heard all the same"


def test_the_watchdog_is_armed_once_a_second() -> None:
    bench = Bench()
    bench.arrive(A)
    for turn in range(100):
        bench.now = turn / 25
        bench.loop.turn()

    assert bench.armed == [61.0] * 4


def test_no_tick_puts_the_end_of_the_process_off() -> None:
    """docling-jobkit#102: a worker that was to end went on hanging."""
    bench = Bench()
    bench.loop.turn()
    bench.pulse.end_within(14.0)
    for second in range(1, 100):
        bench.now = float(second)
        bench.loop.turn()

    assert bench.armed == [61.0, 14.0]


def test_a_loop_without_turns_is_stalled() -> None:
    bench = Bench()
    bench.now = 60.0
    assert not bench.pulse.is_stalled
    bench.now = 60.1
    assert bench.pulse.is_stalled


def test_observers_cannot_hurt_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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
    assert bench.num_observer_errors == 5
    assert caplog.text.count("an observer failed") == 1


def test_where_requests_wait_is_told_twice_a_second() -> None:
    bench = Bench()
    bench.engine.num_waiting = 1
    bench.arrive(A)
    for turn in range(100):
        bench.now = 1 + turn / 50
        bench.loop.turn()

    assert len(bench.outlet.lines) == 4


def test_an_empty_line_is_told_once() -> None:
    bench = Bench()
    bench.engine.num_waiting = 1
    bench.arrive(A)
    bench.loop.turn()
    bench.engine.num_waiting = 0
    for second in range(1, 5):
        bench.now = float(second)
        bench.loop.turn()

    assert [len(line) for line in bench.outlet.lines] == [1, 0]


def test_observers_see_the_engine_idle_after_a_discard() -> None:
    """xllm PR829: gauges that kept the numbers of requests which were gone."""
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
