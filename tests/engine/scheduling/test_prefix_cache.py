"""The prefix cache: a common prefix is computed once, and no sequence reads wrong keys and values."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.outputs import SampledToken, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.scheduling import prefix_cache
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence


def build(**limits: Any) -> Scheduler:
    return Scheduler(EngineConfig(**{"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, **limits}))


def add(scheduler: Scheduler, name: str, prompt: list[int], salt: bytes = b"") -> Sequence:
    sequence = Sequence(name, prompt, SamplingParams(), arrival_time=float(name[1:]), cache_salt=salt)
    scheduler.add_sequence(sequence)
    return sequence


def step(scheduler: Scheduler, *finish: Sequence) -> SchedulerOutputs:
    outputs = scheduler.schedule()
    tokens = {item.sequence: SampledToken(7) for item in outputs.scheduled if item.samples}
    scheduler.update(outputs, tokens, dict.fromkeys(finish, FinishReason.STOP))
    return outputs


def run(scheduler: Scheduler, name: str, prompt: list[int], salt: bytes = b"") -> Sequence:
    """Run one request with one token to its end."""
    sequence = add(scheduler, name, prompt, salt)
    while not sequence.is_finished():
        step(scheduler, *([sequence] if sequence.num_tokens >= len(prompt) else []))
    return sequence


def run_to_first_token(scheduler: Scheduler, name: str, prompt: list[int]) -> Sequence:
    """Step until one request has its first token; others may run."""
    sequence = add(scheduler, name, prompt)
    while sequence.num_tokens == len(prompt):
        step(scheduler)
    return sequence


def starts(outputs: SchedulerOutputs) -> dict[str, int]:
    return {item.sequence.request_id: item.start for item in outputs.scheduled}


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, cached: int) -> None:
    """nano-vllm#144: a prompt of full blocks, all cached, left no token to compute."""
    scheduler = build()
    prompt = list(range(length))
    assert run(scheduler, "r0", prompt).num_cached_tokens == 0

    second = run(scheduler, "r1", prompt)

    assert second.num_cached_tokens == cached


def test_a_block_is_cached_only_after_it_is_written() -> None:
    """nano-vllm#208: the second of two equal prompts in a batch hit blocks that were not computed."""
    scheduler = build(max_num_batched_tokens=24)
    for n in range(3):
        add(scheduler, f"r{n}", [1] * 9)

    assert starts(step(scheduler)) == {"r0": 0, "r1": 0, "r2": 0}
    assert starts(step(scheduler)) == {"r0": 9, "r1": 9, "r2": 6}


def test_the_blocks_of_a_chunk_are_cached_when_it_is_written() -> None:
    scheduler = build(max_num_batched_tokens=6, max_num_prefill_seqs=1)
    add(scheduler, "r0", [1] * 12)
    step(scheduler)
    late = add(scheduler, "r1", [1] * 12)

    step(scheduler)
    outputs = step(scheduler)

    assert starts(outputs)["r1"] == late.num_cached_tokens == 8


def test_generated_tokens_are_cached_when_their_block_is_full() -> None:
    scheduler = build()
    running = add(scheduler, "r0", [1] * 4)
    while running.num_tokens < 10:
        step(scheduler)
    follows = add(scheduler, "r1", [*running.token_ids[:9], 5])

    assert starts(step(scheduler))["r1"] == follows.num_cached_tokens == 8


def test_a_preempted_sequence_reuses_its_own_cached_blocks() -> None:
    """nano-vllm#211: a hit after the chunk was chosen computed tokens that did not exist."""
    scheduler = build(num_kv_blocks=6)
    old = add(scheduler, "r0", [1, 2, 3, 4, 5, 6, 7, 8])
    young = add(scheduler, "r1", [9, 8, 7, 6, 5, 4, 3, 2])
    while not young.num_preemptions:
        step(scheduler)
    known = young.num_tokens
    assert known > 8
    step(scheduler, old)

    outputs = step(scheduler)

    (item,) = outputs.scheduled
    assert (item.sequence, item.start, item.start + item.num_new_tokens) == (young, 8, known)
    assert young.num_cached_tokens == 0, "its own tokens count as no cache hit"


def test_a_resumed_sequence_with_one_uncached_token_is_a_decode() -> None:
    scheduler = build()
    run(scheduler, "r0", list(range(9)))
    resumed = Sequence("r1", list(range(8)), SamplingParams(), arrival_time=1.0)
    resumed.append(8)
    scheduler.add_sequence(resumed)

    assert step(scheduler).decode_sequences == [resumed]


def test_a_hash_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """openvino.genai#3722, vllm#12621: the keys and values of another prompt were used."""
    monkeypatch.setattr(prefix_cache, "block_digest", lambda *_: b"same")
    scheduler = build()
    run(scheduler, "r0", [1, 2, 3, 4, 5])

    assert run(scheduler, "r1", [9, 9, 9, 9, 5]).num_cached_tokens == 0
    assert run(scheduler, "r2", [1, 2, 3, 4, 9]).num_cached_tokens == 4
    assert run(scheduler, "r3", [1, 2, 3, 4, 1, 2, 3, 4, 5]).num_cached_tokens == 4


def test_tokens_that_collide_in_a_rolling_hash_are_no_hit() -> None:
    scheduler = build()
    run(scheduler, "r0", [1, 100, 200, 4, 5])

    assert run(scheduler, "r1", [1, 131, 199, 4, 5]).num_cached_tokens == 0


def test_equal_tokens_after_a_different_prefix_are_no_hit() -> None:
    scheduler = build()
    run(scheduler, "r0", [1, 1, 1, 1, 2, 2, 2, 2, 3])

    assert run(scheduler, "r1", [9, 9, 9, 9, 2, 2, 2, 2, 3]).num_cached_tokens == 0


def test_prompts_with_different_salts_share_no_blocks() -> None:
    """vllm#30931: one tenant reused the keys and values of another."""
    scheduler = build()
    hits = [
        run(scheduler, f"r{n}", [1] * 9, salt).num_cached_tokens
        for n, salt in enumerate([b"a", b"b", b"", b"a", b""])
    ]

    assert hits == [0, 0, 0, 8, 8]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    """LMCache#1116: once the head was evicted, the tail could not be found."""
    scheduler = build(num_kv_blocks=4, max_model_len=17)
    run(scheduler, "r0", list(range(12)))
    run(scheduler, "r1", [90, 91, 92, 93, 94])  # Evicts one cached block.

    assert scheduler.block_manager.num_cached_blocks == 3
    assert run(scheduler, "r2", list(range(13))).num_cached_tokens == 8


def test_a_free_cached_block_is_not_counted_twice() -> None:
    scheduler = build(num_kv_blocks=4, max_model_len=17)
    run(scheduler, "r0", [1] * 8)
    other = add(scheduler, "r1", [2] * 9)
    step(scheduler)
    sequence = add(scheduler, "r2", [1] * 9)

    step(scheduler)

    assert sequence.block_table == []
    assert len(other.block_table) == 3
    assert scheduler.block_manager.num_free_blocks == 1


def test_blocks_of_a_failed_sequence_are_removed_and_zeroed_when_free() -> None:
    scheduler = build()
    bad = add(scheduler, "r0", [1] * 9)
    step(scheduler)
    reader = add(scheduler, "r1", [1] * 9)
    outputs = scheduler.schedule()
    held, shared = set(bad.block_table), set(bad.block_table[:2])
    assert set(reader.block_table[:2]) == shared, "the reader uses blocks of the failing sequence"
    scheduler.update(outputs, {reader: SampledToken(7)}, {bad: FinishReason.ERROR})

    assert set(step(scheduler).blocks_to_zero) == held - shared
    scheduler.abort(reader, FinishReason.CANCELLED)
    add(scheduler, "r3", [5])
    assert set(step(scheduler).blocks_to_zero) == shared
    assert run(scheduler, "r2", [1] * 9).num_cached_tokens == 0


@pytest.mark.parametrize(
    "reason", [FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR], ids=lambda one: one.value
)
@pytest.mark.parametrize("where", ["running", "preempted", "in flight"])
def test_unverified_blocks_are_removed_when_their_sequence_ends(reason: FinishReason, where: str) -> None:
    """Chunks are published when they are written; non-finite ones would fail every request that hits them."""
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=8, max_num_seqs=1)
    sequence = add(scheduler, "r1", list(range(1, 21)))
    cache = scheduler.block_manager.prefix_cache
    step(scheduler)
    assert len(cache) == 2
    if where == "preempted":
        urgent = Sequence("r2", [50], SamplingParams(), arrival_time=2.0, priority=0)
        scheduler.add_sequence(urgent)
        step(scheduler, urgent)
        assert sequence.num_preemptions == 1
        assert len(cache) == 2, "kept while the sequence may continue"
    elif where == "in flight":
        outputs = scheduler.schedule()

    scheduler.abort(sequence, reason)

    assert len(cache) == scheduler.block_manager.num_cached_blocks == 0
    if where == "in flight":
        scheduler.update(outputs, {}, {})
        assert len(cache) == 0
    assert scheduler.block_manager.num_free_blocks == 16
    later = run_to_first_token(scheduler, "r3", list(range(1, 21)))
    assert later.num_cached_tokens == 0
    scheduler.abort(later, FinishReason.CANCELLED)
    assert run_to_first_token(scheduler, "r4", list(range(1, 21))).num_cached_tokens == 16, (
        "verified by a sampled token"
    )


def test_verified_blocks_stay_cached_after_a_cancel() -> None:
    scheduler = build(max_num_batched_tokens=8)
    sequence = add(scheduler, "r0", list(range(1, 13)))
    while sequence.num_output_tokens < 6:
        step(scheduler)

    scheduler.abort(sequence, FinishReason.CANCELLED)

    assert run(scheduler, "r1", [*sequence.token_ids[:16], 5]).num_cached_tokens == 16


def test_a_sampled_token_verifies_the_blocks_that_its_sequence_found() -> None:
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=4, max_num_prefill_seqs=2)
    writer = add(scheduler, "r0", list(range(1, 21)))
    step(scheduler)
    finder = add(scheduler, "r1", [*range(1, 5), 50])
    step(scheduler)
    assert (finder.num_cached_tokens, finder.num_output_tokens) == (4, 1)

    scheduler.abort(writer, FinishReason.CANCELLED)
    scheduler.abort(finder, FinishReason.CANCELLED)

    assert run(scheduler, "r2", list(range(1, 21))).num_cached_tokens == 4, "the rest is unverified"


def test_a_failing_sequence_removes_unverified_blocks_of_another() -> None:
    """The writer still computes its prompt, and has not detected the failure."""
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=4, max_num_prefill_seqs=2)
    writer = add(scheduler, "r0", list(range(1, 29)))
    step(scheduler)
    finder = add(scheduler, "r1", [*range(1, 5), 50])
    outputs = scheduler.schedule()
    assert finder.num_cached_tokens == 4
    scheduler.update(outputs, {}, {finder: FinishReason.ERROR})

    assert run_to_first_token(scheduler, "r2", [*range(1, 5), 60]).num_cached_tokens == 0
    assert not writer.is_finished()


def test_a_sequence_that_fails_before_its_first_token_removes_the_blocks_that_it_found() -> None:
    """With a sliding window, a verified block may have layers that no sampled row has read."""
    scheduler = build()
    run(scheduler, "r0", [1] * 9)
    failing = add(scheduler, "r1", [1] * 9)
    outputs = scheduler.schedule()
    assert failing.num_cached_tokens == 8
    scheduler.update(outputs, {}, {failing: FinishReason.ERROR})

    assert run(scheduler, "r2", [1] * 9).num_cached_tokens == 0


def test_a_sequence_that_fails_after_a_token_keeps_the_blocks_that_it_found() -> None:
    scheduler = build()
    run(scheduler, "r0", [1] * 9)
    failing = add(scheduler, "r1", [1] * 9)
    step(scheduler)
    scheduler.update(scheduler.schedule(), {}, {failing: FinishReason.ERROR})

    assert run(scheduler, "r2", [1] * 9).num_cached_tokens == 8


def test_nothing_is_cached_with_prefix_caching_off() -> None:
    scheduler = build(prefix_caching=False)
    run(scheduler, "r0", [1] * 9)

    assert run(scheduler, "r1", [1] * 9).num_cached_tokens == 0
    assert scheduler.block_manager.num_cached_blocks == 0


def test_a_shared_prefix_is_freed_with_its_last_reference() -> None:
    scheduler = build()
    run(scheduler, "r0", [1] * 9)
    first, second = add(scheduler, "r1", [1] * 9), add(scheduler, "r2", [1] * 9)
    step(scheduler)
    shared = first.block_table[0]
    assert scheduler.block_manager.reference_count(shared) == 2

    scheduler.abort(first, FinishReason.CANCELLED)
    assert scheduler.block_manager.reference_count(shared) == 1
    scheduler.abort(second, FinishReason.CANCELLED)
    assert scheduler.block_manager.num_free_blocks == 16
