"""Nobody starves, whatever else arrives: the real scheduler against streams that would keep one out for ever.

The bound is written down beforehand, and holds for runs of different lengths: it does not grow with them.
"""

from collections.abc import Callable

import pytest

from engine.sequence import Sequence
from tests.engine.scheduling.harness import Bench

MAX_WAITING_SECONDS = 50.0
MAX_TOKENS = 6
PATIENCE_SECONDS = 30.0
# A promoted one starts when those promoted before it have started, and the slots and blocks that it needs are
# free: the remaining tokens of those who run, and as much again for one that was promoted before it.
BOUND = int(MAX_WAITING_SECONDS) + 40

Stream = Callable[[Bench], None]


def urgent(bench: Bench) -> None:
    """sglang#31954: each step a fresh one of the best priority."""
    bench.add(3, MAX_TOKENS, priority=0)


def cached(bench: Bench) -> None:
    """sglang#31954: each step one whose prompt is in the cache, and which is cheap to take."""
    bench.add([5, 5, 5, 5, 5], MAX_TOKENS, priority=2)


def flood(bench: Bench) -> None:
    """Each step five of one tenant."""
    for _ in range(5):
        bench.add(3, MAX_TOKENS, priority=2, tenant="flood")


def long_prompts(bench: Bench) -> None:
    """Each step a prompt of several steps."""
    bench.add(36, MAX_TOKENS, priority=1)


def all_at_once(bench: Bench) -> None:
    for stream in (urgent, cached, flood, long_prompts):
        stream(bench)


STREAMS = (urgent, cached, flood, long_prompts, all_at_once)


def bench_of(policy: str, **limits: object) -> Bench:
    return Bench(
        seconds=1.0,
        policy=policy,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        num_kv_blocks=14,
        prefix_caching=True,
        max_waiting_seconds=MAX_WAITING_SECONDS,
        ageing_seconds=None,
        **limits,
    )


def give_up(bench: Bench, kept: set[Sequence], patience: float = PATIENCE_SECONDS) -> None:
    """The clients of the streams go away before it is their turn; others have come by then.

    Nobody could serve in bounded time all that these streams ask for: they are to keep one out, not to wait.
    """
    line = bench.scheduler.waiting_queue
    bench.end(*(one for one in list(line) if one not in kept and bench.clock.now - one.queued_at > patience))


@pytest.mark.parametrize("policy", ["fifo", "skip_ahead"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("num_steps", [300, 1500])
def test_the_cold_the_low_and_the_large_start_within_the_bound(
    policy: str, stream: Stream, num_steps: int
) -> None:
    bench = bench_of(policy)
    watched: dict[Sequence, int] = {}
    waits: list[int] = []
    for number in range(num_steps):
        stream(bench)
        if number % 100 == 20:
            # Of the lowest priority, in nobody's cache, and as large as the pool allows.
            large = bench.add([9] * 40, MAX_TOKENS, priority=4, tenant="quiet")
            watched[large] = number
        for item in bench.step().scheduled:
            if item.sequence in watched:
                waits.append(number - watched.pop(item.sequence))
        if number % 10 == 0:
            give_up(bench, set(watched))
    assert len(waits) >= num_steps // 100 - 1
    assert max(waits) <= BOUND
    assert all(num_steps - since <= BOUND for since in watched.values()), "one still waits beyond the bound"
    bench.run_out(at_most=5000)


@pytest.mark.parametrize("policy", ["fifo", "skip_ahead"])
@pytest.mark.parametrize("stream", [urgent, all_at_once])
def test_those_who_run_are_not_starved_either(policy: str, stream: Stream) -> None:
    """Once it has started it ends: it is preempted so often at most, then its blocks are its own."""
    bench = bench_of(policy, max_preemptions=2, prefill_reserve=0.3)
    ends: list[int] = []
    for number in range(900):
        stream(bench)
        if number % 150 == 0:
            low, since = bench.add([9] * 20, 20, priority=4, tenant="quiet"), number
        bench.step()
        if low.is_finished() and number < since + 150:
            ends.append(number - since)
            since = -150
            assert low.num_output_tokens == 20
            assert low.num_preemptions <= 2
        if number % 10 == 0:
            give_up(bench, {low})
    assert len(ends) == 6
    assert max(ends) <= 140


def test_without_the_guard_it_would_starve() -> None:
    """That the streams above are what starves somebody, where nothing is done about it."""
    bench = Bench(
        seconds=1.0,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        num_kv_blocks=14,
        max_waiting_seconds=None,
        ageing_seconds=None,
    )
    low = bench.add([9] * 40, MAX_TOKENS, priority=4)
    for number in range(600):
        urgent(bench)
        bench.step()
        if number % 10 == 0:
            give_up(bench, {low})
    assert low.num_computed_tokens == 0


def test_ageing_alone_brings_the_low_ones_in() -> None:
    bench = Bench(
        seconds=1.0, max_num_seqs=1, max_waiting_seconds=None, ageing_seconds=10.0, fair_sharing=False
    )
    low = bench.add(4, MAX_TOKENS, priority=4)
    for _ in range(120):
        bench.add(4, MAX_TOKENS, priority=0)
        bench.step()
        if low.is_finished():
            break
    assert low.is_finished(), "after 40 seconds it stands with the best, and was there before the fresh ones"


@pytest.mark.parametrize("policy", ["fifo", "skip_ahead"])
def test_a_flood_by_one_tenant_does_not_slow_another_beyond_its_share(policy: str) -> None:
    """Two tenants that both always have something in line get the same, whatever the one piles up."""
    bench = Bench(
        seconds=1.0,
        policy=policy,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_waiting_seconds=MAX_WAITING_SECONDS,
        ageing_seconds=10.0,
        num_kv_blocks=24,
    )
    served = {"flood": 0, "modest": 0}
    modest = [bench.add(6, MAX_TOKENS, tenant="modest") for _ in range(2)]
    for number in range(1500):
        for _ in range(3):
            bench.add(6, MAX_TOKENS, tenant="flood")
        while sum(not one.is_finished() for one in modest) < 4:
            modest = [one for one in modest if not one.is_finished()]
            modest.append(bench.add(6, MAX_TOKENS, tenant="modest"))
        for item in bench.step().scheduled:
            served[item.sequence.tenant] += item.num_new_tokens
        if number % 10 == 0:
            give_up(bench, set(modest), patience=2 * MAX_WAITING_SECONDS)
    share = served["modest"] / sum(served.values())
    assert 0.47 <= share <= 0.53


def test_a_quiet_tenant_starts_as_if_the_flood_were_not_there() -> None:
    bench = Bench(seconds=1.0, max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=24)
    waits = []
    for number in range(600):
        for _ in range(3):
            bench.add(6, MAX_TOKENS, tenant="flood")
        if number % 40 == 0:
            quiet = bench.add(6, MAX_TOKENS, tenant="quiet")
            waits.append(bench.steps_until(quiet, at_most=30))
        else:
            bench.step()
        if number % 10 == 0:
            give_up(bench, set(), patience=200.0)
    # As long as a slot takes to come free, and at most one of the flood goes before it.
    assert max(waits) <= 2 * MAX_TOKENS
