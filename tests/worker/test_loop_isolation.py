"""The loop while one request is tried alone: whom it steps, and when it waits."""

from tests.worker.loop_bench import A, B, Bench
from worker.inbox import Cancel, Resume, RetryIsolated


def test_nobody_is_stepped_from_the_hush_on_and_the_loop_goes_round() -> None:
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
    assert len(bench.armed) == 4, "it ticks"


def test_the_device_is_done_with_what_it_was_given_before_the_hush_is_heard() -> None:
    """A step under way that ends the process would be blamed on the one that is tried."""
    bench = Bench()
    bench.arrive(A)
    bench.loop.turn()
    heard = bench.quiesce(B)
    heard_at_drain: list[bool] = []
    bench.engine.drain = lambda: heard_at_drain.append(heard.is_set())  # type: ignore[method-assign]
    bench.loop.turn()

    assert heard_at_drain == [False]
    assert heard.is_set()


def test_the_one_that_is_tried_is_stepped_alone_until_its_trial_is_over() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.try_alone(B)
    bench.loop.turn()
    bench.loop.turn()
    bench.inbox.put(Resume(B))
    bench.loop.turn()

    assert bench.stepped == ["b:o2", "b:o2", "a:o1,b:o2"]


def test_when_the_one_that_is_tried_has_ended_nobody_is_stepped_until_that_is_stored() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.try_alone(B)
    bench.loop.turn()
    bench.inbox.put(Cancel(B))
    bench.loop.turn()
    bench.loop.turn()
    assert bench.stepped == ["b:o2"]
    bench.inbox.put(Resume(B))
    bench.loop.turn()

    assert bench.stepped == ["b:o2", "a:o1"]


def test_a_trial_that_is_over_before_it_begins_prepares_nothing() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.inbox.put(Resume(B))
    bench.try_alone(B)
    bench.loop.turn()

    assert bench.stepped == ["a:o1"]
    assert bench.engine.live == ["a:o1"]


def test_grammars_of_others_are_compiled_before_one_is_tried() -> None:
    """They are in threads of their own, and could end the process too."""
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


def test_one_that_is_gone_before_that_is_not_waited_for() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.engine.is_compiling = True
    bench.quiesce(B)
    bench.loop.turn()
    bench.inbox.put(Resume(B))
    bench.engine.is_compiling = False
    bench.loop.turn()

    assert bench.stepped == ["a:o1", "a:o1"]


def test_the_end_of_another_trial_ends_none() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.inbox.put(Resume(A))
    bench.try_alone(B)
    bench.loop.turn()

    assert bench.stepped == ["b:o2"]


def test_one_that_ended_in_its_preparation_is_not_added() -> None:
    bench = Bench()
    bench.arrive(A)
    bench.quiesce(B)
    bench.inbox.put(RetryIsolated(B, lambda: None))
    bench.loop.turn()

    assert bench.engine.live == ["a:o1"]
    assert bench.stepped == []


def test_a_preparation_that_hangs_is_a_stall() -> None:
    """docling-jobkit#102: what hangs must stop the ticks, so that the watchdog ends the process."""
    bench = Bench()
    bench.quiesce(B)
    seen = []

    def prepare() -> None:
        bench.now = 61.0
        seen.append(bench.watchdog.is_stalled)

    bench.inbox.put(RetryIsolated(B, prepare))
    bench.loop.turn()

    assert seen == [True]


def test_a_full_outlet_stops_a_trial_too() -> None:
    bench = Bench()
    bench.quiesce(B)
    bench.try_alone(B)
    bench.sink.is_full = True
    bench.loop.turn()

    assert bench.stepped == []
    assert bench.sink.num_waits == 1
