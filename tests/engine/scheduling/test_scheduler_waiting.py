"""Who is next of those who wait, and why others are not: order, ageing, fairness, skip-ahead, held ones."""

import pytest

from engine.outputs import WaitingReason
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceStatus
from engine.waiting.ageing import PROMOTED, Ageing
from engine.waiting.fair_share import FairShare
from engine.waiting.lazy_heap import LazyHeap
from tests.engine.scheduling.harness import Bench, names


def test_one_that_aged_into_a_class_goes_by_its_arrival_there() -> None:
    bench = Bench(ageing_seconds=10.0)
    aged = bench.add(priority=2, queued_at=0.0)
    bench.clock.now = 25.0
    fresh = bench.add(priority=0)
    bench.scheduler.waiting_queue.advance(25.0)

    assert bench.scheduler.waiting_queue.head is aged
    assert list(bench.scheduler.waiting_queue) == [aged, fresh]


def line(bench: Bench) -> list[str]:
    return [one.request_id for one in bench.scheduler.waiting_queue]


def test_a_preempted_or_resumed_sequence_takes_its_old_place_in_line() -> None:
    """vllm#41951: preempted requests lost their order in the queue."""
    bench = Bench()
    bench.add(arrival_time=1.0)
    bench.add(arrival_time=3.0)
    bench.add(arrival_time=2.0)

    assert line(bench) == ["r0", "r2", "r1"]


def test_removal_from_the_middle_of_a_long_line_leaves_no_trace() -> None:
    bench = Bench()
    sequences = [bench.add() for _ in range(400)]
    bench.end(*sequences[1::2], *sequences[10:300])

    left = [one for one in sequences if not one.is_finished()]
    assert list(bench.scheduler.waiting_queue) == left
    assert len(bench.scheduler.waiting_queue) == len(left)
    with pytest.raises(KeyError):
        bench.scheduler.waiting_queue.remove(sequences[1])


def test_the_dead_in_a_heap_never_outnumber_the_living_for_long() -> None:
    alive: set[int] = set()
    heap = LazyHeap[tuple[int]](lambda entry: entry[0] in alive)
    for number in range(10_000):
        alive = {number - 1, number}
        heap.push((number,))

    assert heap.num_kept <= 64
    assert heap.top() == (9998,)


# Ageing and promotion.


def test_waiting_makes_more_urgent_one_class_at_a_time() -> None:
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
        ahead = bench.add(priority=better) if better is not None else None
        behind = bench.add(priority=worse)
        expected = [ahead.request_id] if ahead else []
        assert line(bench) == [*expected, low.request_id, behind.request_id]
        bench.end(behind, *([ahead] if ahead else []))


def test_the_times_of_change_agree_with_the_standings_whatever_the_rounding() -> None:
    ageing = Ageing(0.1, 0.7)
    now = since = 1e9 + 0.3
    standings = []
    while now < float("inf"):
        standings.append(ageing.standing(4, since, now))
        now = ageing.next_change(4, since, now)

    assert standings == [4, 3, 2, 1, 0, PROMOTED]


def test_who_waited_too_long_goes_before_all_and_the_longest_waiting_first() -> None:
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


def test_time_spent_elsewhere_counts_and_time_spent_running_does_not() -> None:
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


# Fair shares between tenants.


def test_the_tenant_that_was_served_less_goes_first_and_the_others_are_told() -> None:
    bench = Bench(max_num_seqs=1)
    flood = [bench.add(8, 1, tenant="a") for _ in range(4)]
    bench.step()
    other = bench.add(2, 1, tenant="b")

    assert line(bench)[0] == flood[1].request_id, "b starts level with a, and a was there before"
    bench.step()
    assert bench.scheduler.waiting_queue.head is other
    assert bench.scheduler.waiting_reason(flood[2]) is WaitingReason.FAIR_SHARE
    assert bench.scheduler.waiting_reason(flood[3]) is WaitingReason.FAIR_SHARE
    assert bench.scheduler.waiting_reason(other) is WaitingReason.SEQ_BUDGET
    assert bench.scheduler.waiting_reasons() == {WaitingReason.FAIR_SHARE: 2, WaitingReason.SEQ_BUDGET: 1}
    second = bench.add(2, 1, tenant="b")
    assert bench.scheduler.waiting_reason(second) is WaitingReason.BEHIND


def test_who_is_next_changes_while_one_tenant_is_being_served() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(16, 1, tenant="b")
    bench.step()
    bench.add(4, 30, tenant="a")
    more_of_a, more_of_b = bench.add(4, tenant="a"), bench.add(4, tenant="b")
    bench.scheduler._waiting_pool._sharing._counters.update(a=0)
    bench.step()
    assert bench.scheduler.waiting_queue.head is more_of_a

    while bench.scheduler.waiting_queue.head is more_of_a:
        bench.step()
    assert bench.scheduler.waiting_queue.head is more_of_b
    assert bench.scheduler.running_queue[0].num_output_tokens < 30
    assert bench.scheduler.waiting_reason(more_of_a) is WaitingReason.FAIR_SHARE


def test_priority_goes_before_fairness() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(8, 1, tenant="a")
    bench.step()
    urgent = bench.add(priority=1, tenant="a")
    bench.add(priority=2, tenant="b")

    assert bench.scheduler.waiting_queue.head is urgent
    assert bench.scheduler.waiting_reasons() == {WaitingReason.BEHIND: 2}


def test_without_fair_sharing_arrival_alone_decides() -> None:
    bench = Bench(max_num_seqs=1, fair_sharing=False)
    for tenant in ("a", "a", "a", "b"):
        bench.add(8, 1, tenant=tenant)
    bench.step()
    bench.step()

    assert line(bench) == ["r2", "r3"]


def test_a_tenant_does_not_age_past_another_by_waiting_behind_itself() -> None:
    """All of a flood has waited long; it was served all the time."""
    bench = Bench(max_num_seqs=1, ageing_seconds=10.0, max_waiting_seconds=20.0)
    for _ in range(6):
        bench.add(8, 1, tenant="flood", queued_at=-100.0)
    bench.step()
    modest = bench.add(8, 1, tenant="modest")
    assert names(bench.step()) == ["r1"], "until now nobody else waited, so it had been promoted"
    assert names(bench.step()) == [modest.request_id]


def test_one_that_is_not_served_ages_whoever_else_waits() -> None:
    bench = Bench(max_num_seqs=1, ageing_seconds=None, max_waiting_seconds=20.0)
    low = bench.add(8, 1, priority=4, tenant="a")
    for tenant in "abc":
        bench.add(8, 1, priority=0, tenant=tenant)
    assert low.request_id not in names(bench.step())
    bench.clock.now = 20.0
    assert names(bench.step()) == [low.request_id]


def serve(fair: FairShare, tenant: str, num_tokens: int) -> None:
    sequence = Sequence("r", [1] * num_tokens, SamplingParams(), arrival_time=0.0, tenant=tenant)
    fair.joins(tenant)
    fair.charge(sequence)
    fair.leaves(tenant)


def test_a_head_waits_anew_also_when_another_of_its_line_is_served() -> None:
    """As when a request is tried alone: it is taken from wherever it stands."""
    bench = Bench(ageing_seconds=3.0, max_num_seqs=1)
    head = bench.add(priority=4, tenant="served", queued_at=0.0)
    dear = bench.add(12, 1, priority=0, tenant="other")
    assert names(bench.step()) == [dear.request_id]
    bench.clock.now = 3.0
    tried = bench.add(priority=4, tenant="served", queued_at=3.0)
    other = bench.add(priority=3, tenant="other", queued_at=3.0)
    bench.step(tried)

    assert tried.status is not SequenceStatus.WAITING
    assert bench.scheduler.waiting_queue.head is other
    assert list(bench.scheduler.waiting_queue) == [other, head]


def test_a_tenant_that_was_away_is_not_owed_what_it_did_not_ask_for() -> None:
    fair = FairShare()
    serve(fair, "away", 10)
    fair.joins("busy")
    for _ in range(5):
        serve(fair, "busy", 1000)
    fair.joins("away")

    assert fair.counter("away") == fair.counter("busy") == 5010


def test_with_nobody_in_line_a_tenant_starts_level_with_the_last_who_left() -> None:
    fair = FairShare()
    serve(fair, "busy", 1000)
    fair.joins("new")

    assert fair.counter("new") == 1000


def test_tenants_that_left_are_forgotten_and_those_who_wait_are_not() -> None:
    fair = FairShare(max_remembered=10)
    fair.joins("waits")
    for number in range(1000):
        serve(fair, f"tenant-{number}", 5)

    assert len(fair._counters) <= 22
    assert "waits" in fair._counters
    assert fair.counter("tenant-999") == 5


def test_each_token_is_charged_once_and_what_a_cache_gave_is_free() -> None:
    bench = Bench(prefix_caching=True, num_kv_blocks=5, max_num_seqs=2)
    counter = bench.scheduler._waiting_pool._sharing.counter
    old, young = bench.add([1] * 8, 9, tenant="a"), bench.add([2] * 8, 5, tenant="b")
    while not young.num_preemptions:
        bench.step()
    known = young.num_tokens
    assert counter("b") == known
    bench.end(old)
    assert counter("a") == old.num_tokens

    bench.run_out()
    assert counter("b") == young.num_tokens, "what it computed again was free"
    again = bench.add([2] * 8 + [3], 1, tenant="b")
    before = counter("b")
    bench.run_out()
    assert again.num_cached_tokens == 8
    assert counter("b") == before + 2, "one prompt token that was not cached, and one that was sampled"


# Admission past one that does not fit.


def crowd(**limits: object) -> tuple[Bench, list[Sequence]]:
    """One that runs and holds half of the blocks, a head that lacks blocks, and small ones behind it."""
    bench = Bench(num_kv_blocks=8, max_num_seqs=8, **limits)
    running = bench.add(16, 9)
    bench.step()
    return bench, [running, bench.add(20), *(bench.add(2, 1) for _ in range(5))]


def test_nobody_passes_a_head_that_does_not_fit_under_fifo() -> None:
    bench, (running, head, *small) = crowd()

    assert names(bench.step()) == [running.request_id]
    assert bench.scheduler.waiting_reason(head) is WaitingReason.KV_BLOCKS
    assert {bench.scheduler.waiting_reason(one) for one in small} == {WaitingReason.BEHIND}


def test_so_many_are_tried_past_it_under_skip_ahead() -> None:
    bench, (running, head, *small) = crowd(policy="skip_ahead", max_skip_ahead=2)

    assert names(bench.step()) == [running.request_id, small[0].request_id, small[1].request_id]
    assert list(bench.scheduler.waiting_queue) == [head, *small[2:]]
    assert bench.scheduler.waiting_reason(head) is WaitingReason.KV_BLOCKS


def test_nobody_skips_ahead_of_one_that_was_promoted() -> None:
    """sglang#31954: what was easier to serve went first, for ever."""
    bench, (running, head, *small) = crowd(policy="skip_ahead", max_waiting_seconds=60.0)
    for one in small:
        one.waiting_since = 1e9
    bench.clock.now = 60.0

    assert names(bench.step()) == [running.request_id]
    assert bench.scheduler.waiting_queue.is_head_promoted
    assert bench.scheduler.waiting_queue.head is head


def test_for_want_of_a_slot_nobody_is_tried() -> None:
    bench = Bench(policy="skip_ahead", max_num_seqs=1)
    bench.add()
    bench.step()
    head, other = bench.add(), bench.add()

    outputs = bench.step()
    assert outputs.skipped == ((head, WaitingReason.SEQ_BUDGET),)
    assert bench.scheduler.waiting_reason(other) is WaitingReason.BEHIND


def test_a_whole_prompt_that_does_not_fit_into_the_step_is_passed_by_a_shorter_one() -> None:
    limits = {"max_num_batched_tokens": 16, "chunked_prefill": False, "max_num_prefill_seqs": 4}
    for policy, expected in (("fifo", ["r0"]), ("skip_ahead", ["r0", "r2"])):
        bench = Bench(policy=policy, **limits)
        for prompt in (8, 12, 3):
            bench.add(prompt)
        assert names(bench.step()) == expected


# Held outside of the line.


def test_a_held_sequence_costs_nothing_and_takes_its_place_when_released() -> None:
    bench = Bench(max_num_seqs=1)
    held = bench.add(held=WaitingReason.GRAMMAR)
    free = bench.add()

    assert names(bench.step()) == [free.request_id]
    assert bench.scheduler.has_unfinished_sequences()
    assert bench.scheduler.num_waiting == 1
    assert bench.scheduler.held_sequences == [held]
    assert bench.scheduler.waiting_reason(held) is WaitingReason.GRAMMAR
    assert bench.scheduler.waiting_reasons() == {WaitingReason.GRAMMAR: 1}
    late = bench.add()
    bench.scheduler.release(held)
    bench.scheduler.release(held)
    assert list(bench.scheduler.waiting_queue) == [held, late]
    bench.run_out()


def test_a_held_sequence_can_be_ended_and_is_not_released_then() -> None:
    bench = Bench()
    held = bench.add(held=WaitingReason.SIBLING)
    bench.end(held)
    bench.scheduler.release(held)

    assert held.status is SequenceStatus.FINISHED
    assert not bench.scheduler.has_unfinished_sequences()
    assert bench.scheduler.waiting_reasons() == {}
    with pytest.raises(KeyError):
        bench.scheduler.waiting_reason(held)


def test_only_the_heads_of_lines_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs the same whoever waits: it looks at so many standings, not at all who have one."""
    looks = 0
    standing = Ageing.standing

    def counted(self: Ageing, *waits: float) -> float:
        nonlocal looks
        looks += 1
        return standing(self, *waits)

    bench = Bench(max_num_seqs=2, num_kv_blocks=64, seconds=0.001)
    for number in range(3000):
        bench.add(4, 40, tenant=f"tenant-{number % 100}")
    bench.step()
    monkeypatch.setattr(Ageing, "standing", counted)
    for _ in range(30):
        bench.step()
        bench.scheduler.waiting_reasons()

    assert looks == 0
