"""The scheduler by example."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import NeverFits
from engine.outputs import SampledToken, SchedulerOutputs, WaitingReason
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus


def build(**limits: Any) -> Scheduler:
    return Scheduler(EngineConfig(**{"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, **limits}))


def add_sequences(scheduler: Scheduler, *prompt_lens: int, priority: int = 2) -> list[Sequence]:
    sequences = [
        Sequence(f"r{n}", list(range(length)), SamplingParams(), arrival_time=float(n), priority=priority)
        for n, length in enumerate(prompt_lens)
    ]
    for sequence in sequences:
        scheduler.add_sequence(sequence)
    return sequences


def step(scheduler: Scheduler, *finish: Sequence) -> SchedulerOutputs:
    """One whole step in which every row that samples returns token 7."""
    outputs = scheduler.schedule()
    tokens = {item.sequence: SampledToken(7) for item in outputs.scheduled if item.samples}
    scheduler.update(outputs, tokens, dict.fromkeys(finish, FinishReason.STOP))
    return outputs


def scheduled(outputs: SchedulerOutputs) -> list[tuple[str, int, bool]]:
    """Request id, number of tokens, and whether it samples."""
    return [(item.sequence.request_id, item.num_new_tokens, item.samples) for item in outputs.scheduled]


def test_a_long_prompt_is_computed_in_chunks_and_samples_at_its_end() -> None:
    scheduler = build(max_num_batched_tokens=16)
    add_sequences(scheduler, 40)

    assert [scheduled(step(scheduler)) for _ in range(4)] == [
        [("r0", 16, False)],
        [("r0", 16, False)],
        [("r0", 8, True)],
        [("r0", 1, True)],
    ]


def test_decodes_precede_prefills_and_prefills_precede_waiting_sequences() -> None:
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=8)
    add_sequences(scheduler, 4, 12, 3)

    assert scheduled(step(scheduler)) == [("r0", 4, True), ("r1", 4, False)]
    assert scheduled(step(scheduler)) == [("r0", 1, True), ("r1", 7, False)]
    assert scheduled(step(scheduler)) == [("r0", 1, True), ("r1", 1, True), ("r2", 3, True)]


def test_logits_are_wanted_only_for_rows_that_sample() -> None:
    scheduler = build(max_num_batched_tokens=8)
    add_sequences(scheduler, 12)

    first, second = step(scheduler).prefill, step(scheduler).prefill

    assert (first[0].start, first[0].logits_from) == (0, 8)
    assert (second[0].start, second[0].logits_from) == (8, 3)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_num_seqs": 1}, WaitingReason.SEQ_BUDGET),
        (
            {"max_num_batched_tokens": 8, "chunked_prefill": False, "max_num_prefill_seqs": 4},
            WaitingReason.TOKEN_BUDGET,
        ),
        ({"chunked_prefill": False}, WaitingReason.PREFILL_BUDGET),
        ({"max_num_batched_tokens": 8, "max_chunk_tokens": 8}, WaitingReason.TOKEN_BUDGET),
        ({"max_num_prefill_seqs": 1}, WaitingReason.PREFILL_BUDGET),
        ({"num_kv_blocks": 3}, WaitingReason.KV_BLOCKS),
    ],
)
def test_the_limit_that_keeps_the_head_waiting_is_reported(
    limits: dict[str, int], reason: WaitingReason
) -> None:
    scheduler = build(**limits)
    _, head, next_one = add_sequences(scheduler, 8, 8, 1)

    outputs = step(scheduler)

    assert outputs.skipped == ((head, reason),)
    assert outputs.bound_by is reason
    assert scheduler.waiting_reason(head) is reason
    assert scheduler.waiting_reason(next_one) is WaitingReason.BEHIND


def test_no_sequence_is_admitted_without_a_free_slot() -> None:
    """TGI#2241: remaining slots of 0 were read as "no limit"; vllm#7391: decodes overran the token budget."""
    scheduler = build(max_num_seqs=2, max_num_batched_tokens=4)
    first, second, third = add_sequences(scheduler, 2, 2, 2)

    for _ in range(5):
        outputs = step(scheduler)
        assert {item.sequence for item in outputs.scheduled} == {first, second}
    outputs = step(scheduler, first)
    assert outputs.num_batched_tokens == 2
    assert {item.sequence for item in step(scheduler).scheduled} == {second, third}


def test_decodes_stay_within_the_token_budget() -> None:
    """vllm#7391: more sequences run than the budget has tokens."""
    scheduler = build(max_num_batched_tokens=4, max_num_seqs=8)
    sequences = add_sequences(scheduler, *[1] * 8)

    for _ in range(3):
        assert step(scheduler).num_batched_tokens == 4

    outputs = step(scheduler)
    assert outputs.decode_sequences == sequences[:4]
    assert outputs.bound_by is WaitingReason.TOKEN_BUDGET


def test_sequences_are_admitted_by_priority_then_by_arrival() -> None:
    scheduler = build(max_num_seqs=1)
    slow = add_sequences(scheduler, 1, 1)
    (fast,) = add_sequences(scheduler, 1, priority=0)

    order = []
    for _ in range(3):
        (item,) = step(scheduler, *slow, fast).scheduled
        order.append(item.sequence)
    assert order == [fast, *slow]


def test_the_last_sequence_is_preempted_and_requeued_when_blocks_run_out() -> None:
    scheduler = build(num_kv_blocks=2)
    old, young, waiting = add_sequences(scheduler, 4, 4, 1)
    step(scheduler)

    outputs = step(scheduler)

    assert outputs.decode_sequences == [old]
    assert outputs.preempted == (young,)
    assert outputs.prefill == (), "a step that preempted admits no sequence"
    assert list(scheduler.waiting_queue) == [young, waiting]
    assert young.status is SequenceStatus.WAITING
    assert (young.num_computed_tokens, young.block_table, young.slot) == (0, [], None)
    assert scheduler.waiting_reason(young) is WaitingReason.KV_BLOCKS


def test_the_first_running_sequence_is_never_preempted() -> None:
    scheduler = build(num_kv_blocks=12, max_model_len=48)
    sequences = add_sequences(scheduler, 4, 4, 4, 4)

    while not sequences[0].is_finished():
        done = [sequences[0]] if sequences[0].num_tokens == 40 else []
        step(scheduler, *done)

    assert sequences[0].num_preemptions == 0
    assert sum(one.num_preemptions for one in sequences[1:]) > 0


def test_a_preempted_sequence_is_recomputed_in_chunks_without_chunked_prefill() -> None:
    scheduler = build(max_num_batched_tokens=8, chunked_prefill=False, num_kv_blocks=5, prefix_caching=False)
    old, young = add_sequences(scheduler, 4, 4)
    while not young.num_preemptions:
        step(scheduler)
    assert young.num_tokens > 8

    step(scheduler, old)
    assert scheduled(step(scheduler)) == [("r1", 8, False)]
    assert scheduled(step(scheduler)) == [("r1", young.num_tokens - 1 - 8, True)]


def test_admission_allocates_blocks_for_all_known_tokens() -> None:
    scheduler = build(max_num_batched_tokens=4, num_kv_blocks=6)
    long, other = add_sequences(scheduler, 20, 8)

    step(scheduler)

    assert len(long.block_table) == 5
    assert other.block_table == []


def test_a_failed_allocation_changes_nothing() -> None:
    scheduler = build(num_kv_blocks=3)
    _, second = add_sequences(scheduler, 8, 8)
    step(scheduler)

    assert scheduler.block_manager.num_free_blocks == 1
    assert second.block_table == []
    assert second.status is SequenceStatus.WAITING


@pytest.mark.parametrize(
    ("limits", "prompt_len", "limit"),
    [
        ({}, 48, "47"),
        ({}, 49, "47"),
        ({"num_kv_blocks": 8}, 33, "32"),
        ({"max_num_batched_tokens": 16, "chunked_prefill": False}, 17, "16"),
    ],
)
def test_a_prompt_that_never_fits_is_rejected_with_the_limit(
    limits: dict[str, int], prompt_len: int, limit: str
) -> None:
    """vllm#35541, vllm-metal#199, vllm#23683: such a request blocked the queue for ever."""
    scheduler = build(**limits)

    with pytest.raises(NeverFits, match=limit):
        add_sequences(scheduler, prompt_len)

    assert not scheduler.has_unfinished_sequences()


def test_an_abort_frees_slots_and_blocks_in_every_status() -> None:
    """xllm#828: finish and cancel paths leaked blocks."""
    scheduler = build(max_num_batched_tokens=6, max_num_seqs=2)
    running, prefilling, waiting = add_sequences(scheduler, 4, 8, 4)
    step(scheduler)

    for sequence in (waiting, prefilling, running, running):
        scheduler.abort(sequence, FinishReason.CANCELLED)

    assert scheduler.pop_finished() == [waiting, prefilling, running]
    assert not scheduler.has_unfinished_sequences()
    assert scheduler.block_manager.num_free_blocks == 16
    assert scheduler.schedule().released_slots == (), "an empty step releases no slots"
    add_sequences(scheduler, 1)
    assert sorted(scheduler.schedule().released_slots) == [0, 1]


def test_blocks_of_a_failed_sequence_are_zeroed_by_the_next_step_that_runs() -> None:
    scheduler = build()
    (sequence,) = add_sequences(scheduler, 6)
    outputs = scheduler.schedule()
    held = set(sequence.block_table)
    scheduler.update(outputs, {sequence: SampledToken(None, "not finite")}, {sequence: FinishReason.ERROR})

    assert scheduler.schedule().blocks_to_zero == (), "an empty step zeroes nothing"
    add_sequences(scheduler, 1)
    assert set(step(scheduler).blocks_to_zero) == held
    assert step(scheduler).blocks_to_zero == ()


def test_a_step_does_not_iterate_over_the_waiting_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = build(max_num_seqs=2)
    sequences = add_sequences(scheduler, *[2] * 50)

    def iterate(_: object) -> None:
        raise AssertionError("a step iterated over the queue")

    monkeypatch.setattr("engine.waiting.queue.WaitingQueue.__iter__", iterate)
    step(scheduler)

    assert scheduler.waiting_reasons() == {WaitingReason.SEQ_BUDGET: 1, WaitingReason.BEHIND: 47}
    scheduler.abort(sequences[2], FinishReason.CANCELLED)
    assert scheduler.waiting_reasons() == {WaitingReason.BEHIND: 47}


def test_the_null_block_is_never_allocated() -> None:
    scheduler = build(num_kv_blocks=4)
    (sequence,) = add_sequences(scheduler, 16)
    step(scheduler)

    assert sorted(sequence.block_table) == [1, 2, 3, 4]


def test_a_single_token_is_a_decode_only_after_the_sequence_has_sampled() -> None:
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=8)
    chunked, single = add_sequences(scheduler, 9, 1)

    assert step(scheduler).prefill_sequences == [chunked]
    outputs = step(scheduler)
    assert (outputs.prefill_sequences, outputs.decode_sequences) == ([chunked, single], [])
    assert step(scheduler).decode_sequences == [chunked, single]
