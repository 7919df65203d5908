"""Running sequences: rotation, chunks, prefill reserve, preemption and pinning."""

import pytest

from engine.outputs import WaitingReason
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.scheduling.harness import Bench, names, num_tokens

# Tokens: rotation, reserve, chunks.


def test_decodes_that_do_not_fit_into_a_step_rotate() -> None:
    """vllm#7391: more sequences ran than the budget had tokens, and the first took every step."""
    bench = Bench(max_num_batched_tokens=4, max_num_seqs=6, prefill_reserve=0.5, num_kv_blocks=40)
    sequences = [bench.add(1, 12) for _ in range(6)]
    while any(one.num_output_tokens == 0 for one in sequences):
        bench.step()
    before = [one.num_output_tokens for one in sequences]

    first, second, third = bench.step(), bench.step(), bench.step()

    assert [len(names(outputs)) for outputs in (first, second, third)] == [4, 4, 4]
    gained = [one.num_output_tokens - had for one, had in zip(sequences, before, strict=True)]
    assert gained == [2] * 6, "two tokens each in three steps"
    assert {one.reason for one in first.skipped} == {WaitingReason.TOKEN_BUDGET}


def test_no_reserve_is_kept_without_prefills() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=8, prefill_reserve=0.5, num_kv_blocks=40)
    for _ in range(8):
        bench.add(1, 30)
    bench.step()
    assert len(names(bench.step())) == 8, "no prefill could use a reserve"


def test_the_reserve_is_reported_for_the_decodes_that_it_keeps_out() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=9, prefill_reserve=0.5, num_kv_blocks=40)
    running = [bench.add(1, 30) for _ in range(8)]
    bench.step()
    prompt = bench.add(20)

    outputs = bench.step()

    assert num_tokens(outputs)[prompt.request_id] == 4
    assert len(outputs.decode) == 4
    assert outputs.skipped == tuple((one, WaitingReason.PREFILL_RESERVE) for one in running[4:])
    assert outputs.bound_by is WaitingReason.PREFILL_RESERVE
    assert outputs.num_batched_tokens == 8


def test_a_prompt_that_lacks_blocks_keeps_no_reserve() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=9, prefill_reserve=0.5, num_kv_blocks=12)
    for _ in range(8):
        bench.add(1, 30)
    bench.step()
    bench.add(20)

    assert len(bench.step().decode) == 8


def test_a_whole_prompt_beyond_the_reserve_keeps_none() -> None:
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 9, "num_kv_blocks": 40}
    for prompt, num_decodes in ((4, 4), (5, 8)):
        bench = Bench(prefill_reserve=0.5, chunked_prefill=False, max_num_prefill_seqs=8, **limits)
        for _ in range(8):
            bench.add(1, 30)
        bench.step()
        bench.add(prompt)
        assert len(bench.step().decode) == num_decodes


def test_a_long_prompt_leaves_tokens_to_short_ones() -> None:
    """vllm#10774: a long chunked prefill took whole steps, and short prompts got no first token."""
    bench = Bench(max_num_batched_tokens=16)
    decoding = bench.add(2, 20)
    bench.step()
    long = bench.add(40)
    assert num_tokens(bench.step()) == {decoding.request_id: 1, long.request_id: 15}
    short = bench.add(2)

    outputs = bench.step()

    assert num_tokens(outputs) == {decoding.request_id: 1, long.request_id: 13, short.request_id: 2}
    assert short.num_output_tokens == 1
    assert long.num_output_tokens == 0


def test_a_chunk_is_limited_only_if_another_prefill_can_use_the_rest() -> None:
    bench = Bench(max_num_batched_tokens=16, max_chunk_tokens=2, num_kv_blocks=11)
    long = bench.add(40)
    bench.add(30)

    assert num_tokens(bench.step()) == {long.request_id: 16}, "the other lacks blocks"


def test_without_chunked_prefill_the_chunk_limit_does_not_split_a_prompt() -> None:
    bench = Bench(max_num_batched_tokens=16, max_chunk_tokens=2, chunked_prefill=False)
    first = bench.add(12)
    bench.add(12)

    assert num_tokens(bench.step()) == {first.request_id: 12}


def test_prompt_logprobs_need_all_rows_and_use_no_cached_prefix() -> None:
    """vllm#8268, vllm#3251: prompt logprobs together with cached prefixes gave wrong rows."""
    bench = Bench(max_num_batched_tokens=6, prefix_caching=True)
    bench.add([1] * 9, 1)
    bench.run_to_end()
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    sequence = bench.add([1] * 9, params=params)

    steps = [bench.step().scheduled[0] for _ in range(3)]

    assert [(one.start, one.num_new_tokens, one.logits_from) for one in steps] == [
        (0, 6, 0),
        (6, 3, 0),
        (9, 1, 0),
    ]
    assert sequence.num_cached_tokens == 0


def test_a_chunk_with_prompt_logprobs_is_bounded() -> None:
    limits = {"max_model_len": 2000, "num_kv_blocks": 600, "max_num_batched_tokens": 1000}
    for chunked, rows in ((True, [256, 256, 88]), (False, [600])):
        bench = Bench(chunked_prefill=chunked, **limits)
        bench.add(600, params=SamplingParams(max_tokens=1, prompt_logprobs=5))
        chunks: list[int] = []
        while bench.scheduler.has_unfinished_sequences():
            chunks += [item.num_new_tokens for item in bench.step().scheduled]
        assert chunks == rows


# Slots.


def test_a_higher_priority_preempts_the_lowest_and_an_equal_one_does_not() -> None:
    """vllm#40004: a high priority waited for a low one; the naive fix let equals preempt each other."""
    bench = Bench(max_num_seqs=1)
    low = bench.add(4, 20, priority=3)
    bench.step()
    bench.step()
    high = bench.add(4, 5, priority=1)

    outputs = bench.step()

    assert outputs.preempted == (low,)
    assert names(outputs) == [high.request_id]
    assert bench.scheduler.waiting_reason(low) is WaitingReason.SEQ_BUDGET
    equal = bench.add(4, 5, priority=1)
    while not high.is_finished():
        assert bench.step().preempted == ()
    bench.run_to_end()
    assert (high.num_preemptions, equal.num_preemptions, low.num_preemptions) == (0, 0, 1)
    assert low.num_output_tokens == 20


def test_ageing_does_not_preempt() -> None:
    bench = Bench(max_num_seqs=1, ageing_seconds=1.0, max_waiting_seconds=None)
    bench.add(4, 30, priority=2)
    bench.step()
    bench.add(4, 5, priority=3)
    bench.clock.now = 100.0

    assert bench.step().preempted == ()


def test_a_sequence_that_aged_to_the_head_does_not_preempt_an_equal() -> None:
    bench = Bench(max_num_seqs=1, ageing_seconds=1.0, max_waiting_seconds=None)
    bench.add(4, 30, priority=3)
    bench.step()
    aged = bench.add(4, 5, priority=3)
    bench.clock.now = 100.0
    bench.add(4, 5, priority=0)

    assert bench.step().preempted == ()
    assert bench.scheduler.waiting_queue.head is aged


@pytest.mark.parametrize(("low", "high", "waited"), [(3, 2, 31.0), (4, 2, 61.0), (1, 0, 31.0)])
def test_a_preempted_sequence_that_ages_to_the_head_does_not_get_its_slot_back(
    low: int, high: int, waited: float
) -> None:
    """vllm#40004: the slot belongs to the sequence of higher priority."""
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=16)
    bench.add(4, 2, priority=low)
    victim = bench.add(9, 30, priority=low)
    bench.step()
    bench.clock.now = waited
    bench.steps_until(victim, at_most=4)
    urgent = bench.add(4, 2, priority=high)

    assert bench.steps_until(urgent, at_most=1) == 1
    bench.run_to_end()
    assert victim.num_preemptions == 1


def test_no_slot_is_preempted_for_a_sequence_over_the_budget() -> None:
    bench = Bench(max_num_seqs=2, max_num_prefill_seqs=1, max_num_batched_tokens=3)
    low = bench.add(2, 20, priority=4)
    bench.step()
    bench.add(20, 2, priority=0)
    bench.step()
    bench.add(4, 2, priority=0)

    assert bench.step().preempted == ()
    assert low in bench.scheduler.running_queue


def test_no_slot_is_preempted_while_a_promoted_sequence_waits() -> None:
    bench = Bench(max_num_seqs=1, max_waiting_seconds=60.0)
    running = bench.add(4, 3, priority=4, queued_at=1000.0)
    bench.clock.now = 1000.0
    bench.step()
    promoted = bench.add(4, 5, priority=3, queued_at=0.0)
    urgent = bench.add(4, 5, priority=0)

    while not running.is_finished():
        assert bench.step().preempted == ()
    assert names(bench.step()) == [promoted.request_id]
    while not promoted.is_finished():
        assert bench.step().preempted == (), "a promoted sequence keeps its slot"
    assert names(bench.step()) == [urgent.request_id]


def test_no_slot_is_preempted_for_a_sequence_that_lacks_blocks() -> None:
    bench = Bench(max_num_seqs=2, num_kv_blocks=8)
    bench.add(16, 12, priority=1)
    bench.add(2, 8, priority=3)
    bench.step()
    large = bench.add(24, priority=0)

    assert bench.step().preempted == ()
    assert bench.scheduler.waiting_reason(large) is WaitingReason.SEQ_BUDGET


def claimed_slot_without_blocks() -> tuple[Bench, Sequence, Sequence, Sequence]:
    """`urgent` claims a slot, and in the same step a decode takes a block that it needs."""
    bench = Bench(max_num_seqs=2, policy="skip_ahead", num_kv_blocks=4)
    running, low = bench.add(4, 12, priority=1), bench.add(3, 2, priority=3)
    bench.step()
    urgent = bench.add(12, 2, priority=0)
    small = bench.add(2, 2, priority=1)
    outputs = bench.step()
    assert outputs.preempted == (low,)
    assert names(outputs) == [running.request_id]
    return bench, running, urgent, small


def test_no_sequence_skips_ahead_of_the_claimant() -> None:
    bench, running, urgent, small = claimed_slot_without_blocks()
    for _ in range(3):
        assert names(bench.step()) == [running.request_id]
    bench.cancel(running)
    outputs = bench.step()
    assert names(outputs)[0] == urgent.request_id
    assert small.request_id in names(outputs)


def test_a_claim_ends_with_its_claimant() -> None:
    bench, _, urgent, small = claimed_slot_without_blocks()
    bench.cancel(urgent)
    assert small.request_id in names(bench.step())
    bench.run_to_end()


# Blocks.


def test_a_sequence_preempted_too_often_is_readmitted_with_all_blocks() -> None:
    """vllm#45388, vllm-ascend#16315: without a reservation pinning deadlocks, without pinning they thrash."""
    bench = Bench(num_kv_blocks=9, max_preemptions=1, max_model_len=40)
    old, young = bench.add(4, 20), bench.add(4, 20)
    while not young.num_preemptions:
        bench.step()
    bench.step()
    assert not young.is_pinned
    assert bench.scheduler.waiting_reason(young) is WaitingReason.KV_BLOCKS
    while not old.is_finished():
        assert not young.is_pinned, "six blocks for 24 tokens are not free while the other sequence runs"
        bench.step()

    bench.step()
    assert young.is_pinned
    assert len(young.block_table) == 6
    bench.run_to_end()
    assert young.num_preemptions == 1


def test_a_step_that_preempted_for_blocks_admits_no_sequence() -> None:
    bench = Bench(num_kv_blocks=4)
    bench.add(4, 20)
    young = bench.add(12, 8)
    bench.step()
    small = bench.add(2, 1, priority=0)

    outputs = bench.step()

    assert outputs.preempted == (young,)
    assert outputs.prefill == ()
    assert bench.scheduler.waiting_reason(small) is WaitingReason.KV_BLOCKS
    assert names(bench.step()) == ["r0", small.request_id]


def test_the_first_sequence_waits_while_all_others_are_pinned() -> None:
    bench = Bench(num_kv_blocks=9, max_preemptions=0, max_num_seqs=2, max_model_len=40)
    pinned = bench.add(4, 20, priority=2)
    bench.step()
    first = bench.add(4, 12, priority=1)
    first.num_preemptions = -9  # So that it is not pinned, and holds no reservation.
    bench.step()
    while first.num_tokens < 12:
        bench.step()
    stalled = 0
    while not pinned.is_finished():
        outputs = bench.step()
        assert not outputs.preempted
        assert pinned.is_finished() or pinned.request_id in names(outputs)
        stalled += (first, WaitingReason.KV_BLOCKS) in outputs.skipped
    assert stalled
    bench.run_to_end()
    assert first.num_output_tokens == 12


def test_a_pool_that_fits_one_request_serves_all() -> None:
    for num_kv_blocks in (6, 7, 9, 12):
        for max_preemptions in (0, 1, 3):
            bench = Bench(
                num_kv_blocks=num_kv_blocks,
                max_preemptions=max_preemptions,
                max_model_len=24,
                max_num_batched_tokens=16,
                prefix_caching=bool(num_kv_blocks % 2),
            )
            sequences = [bench.add(1 + n % 7, 12 + n % 5, priority=n % 3) for n in range(12)]
            bench.run_to_end()
            assert [one.num_output_tokens for one in sequences] == [12 + n % 5 for n in range(12)]
            assert max(one.num_preemptions for one in sequences) <= max_preemptions


def group(bench: Bench, n: int) -> list[Sequence]:
    params = SamplingParams(n=n, max_tokens=3)
    return [
        bench.add(
            [1] * 9,
            params=params,
            index=index,
            arrival_time=0.0,
            cache_salt=b"this request",
            deferred=WaitingReason.SIBLING if index else None,
        )
        for index in range(n)
    ]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_outputs_of_one_request_share_the_blocks_of_its_prompt(prefix_caching: bool) -> None:
    bench = Bench(prefix_caching=prefix_caching)
    first, *others = group(bench, 3)
    assert num_tokens(bench.step()) == {first.request_id: 9}
    for one in others:
        assert bench.scheduler.waiting_reason(one) is WaitingReason.SIBLING
        bench.scheduler.enqueue(one)

    assert num_tokens(bench.step()) == {first.request_id: 1, **{one.request_id: 1 for one in others}}
    for block in first.block_table[:2]:
        assert bench.scheduler.block_manager.reference_count(block) == 3
    bench.run_to_end()


def test_a_sequence_aborted_during_its_step_is_not_published() -> None:
    bench = Bench(prefix_caching=True)
    aborted = bench.add([1] * 9)
    outputs = bench.scheduler.schedule()
    bench.cancel(aborted)
    bench.scheduler.update(outputs, {}, {})

    again = bench.add([1] * 9)
    bench.step()
    assert again.num_cached_tokens == 0
    bench.run_to_end()


def test_a_prompt_gets_equal_chunks_at_any_position() -> None:
    bench = Bench(max_num_batched_tokens=16, max_model_len=96, num_kv_blocks=40)
    bench.add(prompt=64)
    assert [num_tokens(bench.step()) for _ in range(4)] == [{"r0": 16}] * 4
