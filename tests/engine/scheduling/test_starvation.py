"""No sequence starves, under streams of requests that a plain priority queue would always serve first.

The bound on the wait is the same for runs of different lengths.
"""

from collections.abc import Callable
from typing import Any

import pytest

from engine.sequence import Sequence
from tests.engine.scheduling.harness import Bench

MAX_WAITING_SECONDS = 50.0
MAX_TOKENS = 6
PATIENCE_SECONDS = 30.0
# A promoted sequence starts once earlier promoted ones have started and a slot and blocks are free. That
# takes the remaining tokens of the running sequences, and the same again for one promoted before it.
BOUND = int(MAX_WAITING_SECONDS) + 40

Stream = Callable[[Bench], None]


def urgent(bench: Bench) -> None:
    """sglang#31954: each step a new request of the best priority."""
    bench.add(3, MAX_TOKENS, priority=0)


def cached(bench: Bench) -> None:
    """sglang#31954: each step a request whose prompt is cached."""
    bench.add([5, 5, 5, 5, 5], MAX_TOKENS, priority=2)


def flood(bench: Bench) -> None:
    """Each step five requests."""
    for _ in range(5):
        bench.add(3, MAX_TOKENS, priority=2)


def long_prompts(bench: Bench) -> None:
    """Each step a prompt that takes several steps."""
    bench.add(36, MAX_TOKENS, priority=1)


def all_at_once(bench: Bench) -> None:
    for stream in (urgent, cached, flood, long_prompts):
        stream(bench)


STREAMS = (urgent, cached, flood, long_prompts, all_at_once)


def make_bench(policy: str, **limits: Any) -> Bench:
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


def cancel_old(bench: Bench, kept: set[Sequence]) -> None:
    """Cancel requests of the streams that have waited long: the streams exceed what the engine can serve."""
    now, queue = bench.clock.now, list(bench.scheduler.waiting_queue)
    bench.cancel(*(one for one in queue if one not in kept and now - queued_at(one) > PATIENCE_SECONDS))


def queued_at(sequence: Sequence) -> float:
    assert sequence.queued_at is not None
    return sequence.queued_at


@pytest.mark.parametrize("policy", ["fifo", "skip_ahead"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("num_steps", [300, 1500])
def test_a_large_uncached_request_of_low_priority_starts_within_the_bound(
    policy: str, stream: Stream, num_steps: int
) -> None:
    bench = make_bench(policy)
    watched: dict[Sequence, int] = {}
    waits: list[int] = []
    for number in range(num_steps):
        stream(bench)
        if number % 100 == 20:
            # Of the lowest priority, not cached, and as large as the pool allows.
            large = bench.add([9] * 40, MAX_TOKENS, priority=4)
            watched[large] = number
        for item in bench.step().scheduled:
            if item.sequence in watched:
                waits.append(number - watched.pop(item.sequence))
        if number % 10 == 0:
            cancel_old(bench, set(watched))
    assert len(waits) >= num_steps // 100 - 1
    assert max(waits) <= BOUND
    assert all(num_steps - since <= BOUND for since in watched.values()), (
        "a sequence waits longer than the bound"
    )
    bench.run_to_end(at_most=5000)


@pytest.mark.parametrize("policy", ["fifo", "skip_ahead"])
@pytest.mark.parametrize("stream", [urgent, all_at_once])
def test_a_running_sequence_ends_within_the_bound(policy: str, stream: Stream) -> None:
    """It is preempted at most `max_preemptions` times, then it is pinned."""
    bench = make_bench(policy, max_preemptions=2, prefill_reserve=0.3)
    ends: list[int] = []
    for number in range(900):
        stream(bench)
        if number % 150 == 0:
            low, since = bench.add([9] * 20, 20, priority=4), number
        bench.step()
        if low.is_finished() and number < since + 150:
            ends.append(number - since)
            since = -150
            assert low.num_output_tokens == 20
            assert low.num_preemptions <= 2
        if number % 10 == 0:
            cancel_old(bench, {low})
    assert len(ends) == 6
    assert max(ends) <= 140


def test_without_ageing_and_promotion_the_stream_starves_a_request() -> None:
    """The streams above are strong enough to starve a request."""
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
            cancel_old(bench, {low})
    assert low.num_computed_tokens == 0


def test_ageing_alone_admits_a_low_priority() -> None:
    bench = Bench(seconds=1.0, max_num_seqs=1, max_waiting_seconds=None, ageing_seconds=10.0)
    low = bench.add(4, MAX_TOKENS, priority=4)
    for _ in range(120):
        bench.add(4, MAX_TOKENS, priority=0)
        bench.step()
        if low.is_finished():
            break
    assert low.is_finished(), "after 40 seconds it has the best class, and arrived first"
