"""The loop during an isolated retry: which requests it steps, and when it waits."""

from tests.worker.loop_bench import A, B, Bench
from worker.inbox import Cancel, Resume, RetryIsolated


def test_a_quiesced_loop_steps_no_request_and_keeps_turning() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.loop.turn()
    heard = bench.quiesce(B)
    assert not heard.is_set()
    for second in range(1, 4):
        bench.now = float(second)
        bench.loop.turn()

    assert heard.is_set()
    assert bench.stepped == ["a:o1"]
    assert len(bench.armed) == 4, "it still ticks"


def test_the_device_is_drained_before_quiescing_is_confirmed() -> None:
    """A crash of a step in flight would be blamed on the suspect."""
    bench = Bench()
    bench.arrive(A)
    bench.loop.turn()
    heard = bench.quiesce(B)
    heard_at_drain: list[bool] = []
    bench.engine.drain = lambda: heard_at_drain.append(heard.is_set())  # type: ignore[method-assign]
    bench.loop.turn()

    assert heard_at_drain == [False]
    assert heard.is_set()


def test_a_suspect_is_stepped_alone_until_resume() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.retry(B)
    bench.loop.turn()
    bench.loop.turn()
    bench.inbox.put(Resume(B))
    bench.loop.turn()

    assert bench.stepped == ["b:o2", "b:o2", "a:o1,b:o2"]


def test_no_request_is_stepped_after_the_suspect_finished_until_resume() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.retry(B)
    bench.loop.turn()
    bench.inbox.put(Cancel(B))
    bench.loop.turn()
    bench.loop.turn()
    assert bench.stepped == ["b:o2"]
    bench.inbox.put(Resume(B))
    bench.loop.turn()

    assert bench.stepped == ["b:o2", "a:o1"]


def test_a_retry_resumed_before_it_begins_prepares_nothing() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.inbox.put(Resume(B))
    bench.retry(B)
    bench.loop.turn()

    assert bench.stepped == ["a:o1"]
    assert bench.engine.live == ["a:o1"]


def test_grammars_of_other_requests_are_compiled_before_a_retry() -> None:
    """A crash in a compiler thread would be blamed on the suspect."""
    bench = Bench()
    bench.arrive(A)
    bench.engine.is_compiling = True
    heard = bench.quiesce(B)
    bench.loop.turn()
    assert not heard.is_set()
    assert bench.stepped == ["a:o1"]
    bench.engine.is_compiling = False
    bench.loop.turn()

    assert heard.is_set()
    assert bench.stepped == ["a:o1"]


def test_a_resume_cancels_quiescing() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.engine.is_compiling = True
    bench.quiesce(B)
    bench.loop.turn()
    bench.inbox.put(Resume(B))
    bench.engine.is_compiling = False
    bench.loop.turn()

    assert bench.stepped == ["a:o1", "a:o1"]


def test_a_resume_for_another_task_is_ignored() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.inbox.put(Resume(A))
    bench.retry(B)
    bench.loop.turn()

    assert bench.stepped == ["b:o2"]


def test_a_suspect_that_ends_in_preparation_is_not_added() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.inbox.put(RetryIsolated(B, lambda: None))
    bench.loop.turn()

    assert bench.engine.live == ["a:o1"]
    assert bench.stepped == []


def test_a_preparation_that_hangs_stalls_the_loop() -> None:
    """docling-jobkit#102: a hang must stop the ticks, so that the watchdog ends the process."""
    bench = Bench()
    bench.quiesce(B)
    seen = []

    def prepare() -> None:
        bench.now = 61.0
        seen.append(bench.watchdog.is_stalled)

    bench.inbox.put(RetryIsolated(B, prepare))
    bench.loop.turn()

    assert seen == [True]


def test_a_full_sink_stops_an_isolated_retry() -> None:
    bench = Bench()
    bench.quiesce(B)
    bench.retry(B)
    bench.sink.is_full = True
    bench.loop.turn()

    assert bench.stepped == []
    assert bench.sink.num_waits == 1
