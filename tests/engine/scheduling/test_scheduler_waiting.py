"""Waiting sequences: their order, ageing, skip-ahead, deferral, and the reported reasons."""

from typing import Any

import pytest

from engine.outputs import WaitingReason
from engine.sequence import Sequence, SequenceStatus
from engine.waiting.ageing import Ageing
from tests.engine.scheduling.harness import Bench, names


def test_an_aged_sequence_is_ordered_by_arrival_in_its_new_class() -> None:
    bench = Bench(ageing_seconds=10.0)
    aged = bench.add(priority=2, queued_at=0.0)
    bench.clock.now = 25.0
    fresh = bench.add(priority=0)
    bench.scheduler.waiting_queue.advance(25.0)

    assert bench.scheduler.waiting_queue.head is aged
    assert list(bench.scheduler.waiting_queue) == [aged, fresh]


def test_a_preempted_or_resumed_sequence_returns_to_its_position() -> None:
    """vllm#41951: preempted requests lost their order in the queue."""
    bench = Bench()
    bench.add(arrival_time=1.0)
    bench.add(arrival_time=3.0)
    bench.add(arrival_time=2.0)

    assert bench.queue() == ["r0", "r2", "r1"]


def test_sequences_can_be_removed_from_any_position() -> None:
    bench = Bench()
    sequences = [bench.add(priority=number % 3) for number in range(400)]
    bench.cancel(*sequences[1::2], *sequences[10:300])

    remaining = [one for one in sequences if not one.is_finished()]
    queue = bench.scheduler.waiting_queue
    assert list(queue) == sorted(remaining, key=lambda one: one.order)
    assert len(queue) == len(remaining)
    assert [one for one in sequences if one in queue] == remaining


def test_removing_a_sequence_that_does_not_wait_raises() -> None:
    bench = Bench()
    sequence = bench.add()
    bench.step()

    with pytest.raises(KeyError, match="r0"):
        bench.scheduler.waiting_queue.remove(sequence)


def test_a_waiting_sequence_rises_one_class_per_ageing_interval() -> None:
    bench = Bench(ageing_seconds=10.0, max_waiting_seconds=None, max_num_seqs=1)
    low = bench.add(priority=3)

    for seconds, better, worse in (
        (9.9, 2, 4),
        (10.0, 1, 3),
        (20.0, 0, 2),
        (30.0, None, 1),
        (500.0, None, 1),
    ):
        bench.clock.now = seconds
        bench.scheduler.waiting_queue.advance(seconds)
        earlier = bench.add(priority=better) if better is not None else None
        later = bench.add(priority=worse)
        expected = [earlier.request_id] if earlier else []
        assert bench.queue() == [*expected, low.request_id, later.request_id]
        bench.cancel(later, *([earlier] if earlier else []))


def test_promoted_sequences_precede_all_others_in_order_of_their_wait() -> None:
    bench = Bench(ageing_seconds=None, max_waiting_seconds=60.0)
    late = bench.add(priority=4, queued_at=0.0)
    later = bench.add(priority=3, queued_at=5.0)
    fresh = bench.add(priority=0, queued_at=59.0)

    for seconds, expected in ((59.0, [fresh, later, late]), (60.0, [late, fresh, later])):
        bench.scheduler.waiting_queue.advance(seconds)
        assert list(bench.scheduler.waiting_queue) == expected
        assert bench.scheduler.waiting_queue.head is expected[0]
    bench.scheduler.waiting_queue.advance(65.0)
    assert list(bench.scheduler.waiting_queue) == [late, later, fresh]


def test_a_low_priority_is_promoted_whatever_else_waits() -> None:
    bench = Bench(max_num_seqs=1, ageing_seconds=None, max_waiting_seconds=20.0)
    low = bench.add(8, 1, priority=4)
    for _ in range(3):
        bench.add(8, 1, priority=0)
    assert low.request_id not in names(bench.step())
    bench.clock.now = 20.0
    assert names(bench.step()) == [low.request_id]


def test_the_wait_before_the_engine_counts_and_the_time_spent_running_does_not() -> None:
    bench = Bench(num_kv_blocks=2, max_waiting_seconds=60.0, max_num_seqs=2)
    old = bench.add(4, queued_at=-100.0)
    young = bench.add(4)
    assert bench.scheduler.waiting_queue.head is old
    bench.step()
    assert old.is_promoted
    assert not young.is_promoted
    bench.clock.now = 1000.0

    assert bench.step().preempted == (young,)
    bench.clock.now = 1059.0
    bench.scheduler.waiting_queue.advance(1059.0)
    assert not bench.scheduler.waiting_queue.is_head_promoted
    bench.scheduler.waiting_queue.advance(1060.0)
    assert bench.scheduler.waiting_queue.is_head_promoted


def test_sequences_after_the_head_wait_for_it() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(8, 1)
    bench.step()
    urgent = bench.add(priority=1)
    bench.add(priority=2)

    assert bench.scheduler.waiting_queue.head is urgent
    assert bench.scheduler.waiting_reasons() == {WaitingReason.BEHIND: 2}


# Skip-ahead.


def skip_ahead_bench(**limits: Any) -> tuple[Bench, list[Sequence]]:
    """A running sequence with half of the blocks, a head that lacks blocks, and small ones after it."""
    bench = Bench(num_kv_blocks=8, max_num_seqs=8, **limits)
    running = bench.add(16, 9)
    bench.step()
    return bench, [running, bench.add(20), *(bench.add(2, 1) for _ in range(5))]


def test_fifo_admits_no_sequence_before_a_head_that_does_not_fit() -> None:
    bench, (running, head, *small) = skip_ahead_bench()

    assert names(bench.step()) == [running.request_id]
    assert bench.scheduler.waiting_reason(head) is WaitingReason.KV_BLOCKS
    assert {bench.scheduler.waiting_reason(one) for one in small} == {WaitingReason.BEHIND}


def test_skip_ahead_tries_at_most_max_skip_ahead_sequences() -> None:
    bench, (running, head, *small) = skip_ahead_bench(policy="skip_ahead", max_skip_ahead=2)

    assert names(bench.step()) == [running.request_id, small[0].request_id, small[1].request_id]
    assert list(bench.scheduler.waiting_queue) == [head, *small[2:]]
    assert bench.scheduler.waiting_reason(head) is WaitingReason.KV_BLOCKS


def test_a_promoted_sequence_is_not_skipped() -> None:
    """sglang#31954: requests that were easier to serve always went first."""
    bench, (running, head, *small) = skip_ahead_bench(policy="skip_ahead", max_waiting_seconds=60.0)
    for one in small:
        one.waiting_since = 1e9
    bench.clock.now = 60.0

    assert names(bench.step()) == [running.request_id]
    assert bench.scheduler.waiting_queue.is_head_promoted
    assert bench.scheduler.waiting_queue.head is head


def test_skip_ahead_tries_no_sequence_without_a_free_slot() -> None:
    bench = Bench(policy="skip_ahead", max_num_seqs=1)
    bench.add()
    bench.step()
    head, other = bench.add(), bench.add()

    outputs = bench.step()
    assert outputs.skipped == ((head, WaitingReason.SEQ_BUDGET),)
    assert bench.scheduler.waiting_reason(other) is WaitingReason.BEHIND


@pytest.mark.parametrize(("policy", "expected"), [("fifo", ["r0"]), ("skip_ahead", ["r0", "r2"])])
def test_skip_ahead_admits_a_shorter_prompt_that_fits_into_the_step(policy: str, expected: list[str]) -> None:
    bench = Bench(policy=policy, max_num_batched_tokens=16, chunked_prefill=False, max_num_prefill_seqs=4)
    for prompt in (8, 12, 3):
        bench.add(prompt)
    assert names(bench.step()) == expected


# Deferred sequences.


def test_a_deferred_sequence_enters_the_queue_at_its_position() -> None:
    bench = Bench(max_num_seqs=1)
    deferred = bench.add(deferred=WaitingReason.GRAMMAR)
    ready = bench.add()

    assert names(bench.step()) == [ready.request_id]
    assert bench.scheduler.has_unfinished_sequences()
    assert bench.scheduler.num_waiting == 1
    assert bench.scheduler.deferred_sequences == [deferred]
    assert bench.scheduler.waiting_reason(deferred) is WaitingReason.GRAMMAR
    assert bench.scheduler.waiting_reasons() == {WaitingReason.GRAMMAR: 1}
    late = bench.add()
    bench.scheduler.enqueue(deferred)
    bench.scheduler.enqueue(deferred)
    assert list(bench.scheduler.waiting_queue) == [deferred, late]
    bench.run_to_end()


def test_a_deferred_sequence_that_was_aborted_does_not_enter_the_queue() -> None:
    bench = Bench()
    deferred = bench.add(deferred=WaitingReason.SIBLING)
    bench.cancel(deferred)
    bench.scheduler.enqueue(deferred)

    assert deferred.status is SequenceStatus.FINISHED
    assert not bench.scheduler.has_unfinished_sequences()
    assert bench.scheduler.waiting_reasons() == {}
    with pytest.raises(KeyError):
        bench.scheduler.waiting_reason(deferred)


def test_a_step_ranks_only_the_first_sequence_of_each_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a step does not depend on how many sequences wait."""
    num_ranked = 0
    rank = Ageing.rank

    def counted(self: Ageing, priority: int, waiting_since: float, now: float) -> float:
        nonlocal num_ranked
        num_ranked += 1
        return rank(self, priority, waiting_since, now)

    bench = Bench(max_num_seqs=2, num_kv_blocks=64, seconds=0.001)
    for number in range(3000):
        bench.add(4, 40, priority=number % 5)
    bench.step()
    monkeypatch.setattr(Ageing, "rank", counted)
    for _ in range(30):
        bench.step()
        bench.scheduler.waiting_reasons()

    assert num_ranked <= 30 * 5
