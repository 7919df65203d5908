"""A prompt that begins as an earlier one is not computed again; and nobody gets another's keys and values."""

import pytest

from engine.config import EngineConfig
from engine.outputs import SampledToken, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.scheduling import prefix_cache
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence


def build(**limits: int) -> Scheduler:
    return Scheduler(EngineConfig(**{"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, **limits}))


def arrive(scheduler: Scheduler, name: str, prompt: list[int], salt: bytes = b"") -> Sequence:
    sequence = Sequence(name, prompt, SamplingParams(), arrival_time=float(name[1:]), cache_salt=salt)
    scheduler.add_sequence(sequence)
    return sequence


def step(scheduler: Scheduler, *finish: Sequence) -> SchedulerOutputs:
    outputs = scheduler.schedule()
    tokens = {item.sequence: SampledToken(7) for item in outputs.scheduled if item.samples}
    scheduler.update(outputs, tokens, dict.fromkeys(finish, FinishReason.STOP))
    return outputs


def serve(scheduler: Scheduler, name: str, prompt: list[int], salt: bytes = b"") -> Sequence:
    """One request, alone, with one token."""
    sequence = arrive(scheduler, name, prompt, salt)
    while not sequence.is_finished():
        step(scheduler, *([sequence] if sequence.num_tokens >= len(prompt) else []))
    return sequence


def serve_beside(scheduler: Scheduler, name: str, prompt: list[int]) -> Sequence:
    """One request, with one token, while others run."""
    sequence = arrive(scheduler, name, prompt)
    while sequence.num_tokens == len(prompt):
        step(scheduler)
    return sequence


def starts(outputs: SchedulerOutputs) -> dict[str, int]:
    return {item.sequence.request_id: item.start for item in outputs.scheduled}


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_leaves_at_least_the_last_token_to_compute(length: int, cached: int) -> None:
    """nano-vllm#144: a prompt of whole blocks, all of them cached, left no token to run."""
    scheduler = build()
    prompt = list(range(length))
    assert serve(scheduler, "r0", prompt).num_cached_tokens == 0

    second = serve(scheduler, "r1", prompt)

    assert second.num_cached_tokens == cached


def test_a_block_is_found_only_after_its_values_are_written() -> None:
    """nano-vllm#208: the second of two equal prompts in one batch hit blocks not computed yet."""
    scheduler = build(max_num_batched_tokens=24)
    for n in range(3):
        arrive(scheduler, f"r{n}", [1] * 9)

    assert starts(step(scheduler)) == {"r0": 0, "r1": 0, "r2": 0}
    assert starts(step(scheduler)) == {"r0": 9, "r1": 9, "r2": 6}


def test_chunks_are_found_as_they_are_written() -> None:
    scheduler = build(max_num_batched_tokens=6, max_num_prefill_seqs=1)
    arrive(scheduler, "r0", [1] * 12)
    step(scheduler)
    late = arrive(scheduler, "r1", [1] * 12)

    step(scheduler)
    outputs = step(scheduler)

    assert starts(outputs)["r1"] == late.num_cached_tokens == 8


def test_what_a_running_one_generated_is_found_as_its_blocks_fill() -> None:
    scheduler = build()
    running = arrive(scheduler, "r0", [1] * 4)
    while running.num_tokens < 10:
        step(scheduler)
    follows = arrive(scheduler, "r1", [*running.token_ids[:9], 5])

    assert starts(step(scheduler))["r1"] == follows.num_cached_tokens == 8


def test_a_preempted_sequence_finds_its_own_blocks_and_computes_the_rest() -> None:
    """nano-vllm#211: a hit after the share was fixed computed tokens that were not there."""
    scheduler = build(num_kv_blocks=6)
    old = arrive(scheduler, "r0", [1, 2, 3, 4, 5, 6, 7, 8])
    young = arrive(scheduler, "r1", [9, 8, 7, 6, 5, 4, 3, 2])
    while not young.num_preemptions:
        step(scheduler)
    known = young.num_tokens
    assert known > 8
    step(scheduler, old)

    outputs = step(scheduler)

    (item,) = outputs.scheduled
    assert (item.sequence, item.start, item.start + item.num_new_tokens) == (young, 8, known)
    assert young.num_cached_tokens == 0, "its own tokens are not a hit that saved the user anything"


def test_one_that_had_sampled_and_misses_one_token_is_a_decode() -> None:
    scheduler = build()
    serve(scheduler, "r0", list(range(9)))
    resumed = Sequence("r1", list(range(8)), SamplingParams(), arrival_time=1.0, output_token_ids=[8])
    scheduler.add_sequence(resumed)

    assert step(scheduler).decode_sequences == [resumed]


def test_equal_hashes_of_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """openvino.genai#3722, vllm#12621: another prompt's keys and values were used."""
    monkeypatch.setattr(prefix_cache, "block_digest", lambda *_: b"same")
    scheduler = build()
    serve(scheduler, "r0", [1, 2, 3, 4, 5])

    assert serve(scheduler, "r1", [9, 9, 9, 9, 5]).num_cached_tokens == 0
    assert serve(scheduler, "r2", [1, 2, 3, 4, 9]).num_cached_tokens == 4
    assert serve(scheduler, "r3", [1, 2, 3, 4, 1, 2, 3, 4, 5]).num_cached_tokens == 4


def test_a_rolling_hash_could_be_fooled_and_this_one_is_not() -> None:
    scheduler = build()
    serve(scheduler, "r0", [1, 100, 200, 4, 5])

    assert serve(scheduler, "r1", [1, 131, 199, 4, 5]).num_cached_tokens == 0


def test_the_same_tokens_after_other_tokens_are_no_hit() -> None:
    scheduler = build()
    serve(scheduler, "r0", [1, 1, 1, 1, 2, 2, 2, 2, 3])

    assert serve(scheduler, "r1", [9, 9, 9, 9, 2, 2, 2, 2, 3]).num_cached_tokens == 0


def test_salts_keep_prefixes_apart() -> None:
    """vllm#30931: the same prompt of another tenant reused its keys and values."""
    scheduler = build()
    hits = [
        serve(scheduler, f"r{n}", [1] * 9, salt).num_cached_tokens
        for n, salt in enumerate([b"a", b"b", b"", b"a", b""])
    ]

    assert hits == [0, 0, 0, 8, 8]


def test_tails_are_given_away_before_their_heads() -> None:
    """LMCache#1116: with the head gone, what was left could not be found."""
    scheduler = build(num_kv_blocks=4, max_model_len=17)
    serve(scheduler, "r0", list(range(12)))
    serve(scheduler, "r1", [90, 91, 92, 93, 94])  # one block from what holds nothing, one from the cache

    assert scheduler.block_manager.num_cached_blocks == 3
    assert serve(scheduler, "r2", list(range(13))).num_cached_tokens == 8


def test_a_hit_that_is_free_is_not_counted_twice_as_room() -> None:
    scheduler = build(num_kv_blocks=4, max_model_len=17)
    serve(scheduler, "r0", [1] * 8)
    other = arrive(scheduler, "r1", [2] * 9)
    step(scheduler)
    asks = arrive(scheduler, "r2", [1] * 9)

    step(scheduler)

    assert asks.block_table == []
    assert len(other.block_table) == 3
    assert scheduler.block_manager.num_free_blocks == 1


def test_what_is_not_finite_is_taken_out_and_zeroed_when_free() -> None:
    scheduler = build()
    bad = arrive(scheduler, "r0", [1] * 9)
    step(scheduler)
    mate = arrive(scheduler, "r1", [1] * 9)
    outputs = scheduler.schedule()
    held, shared = set(bad.block_table), set(bad.block_table[:2])
    assert set(mate.block_table[:2]) == shared, "the mate reads what the bad one wrote"
    scheduler.update(outputs, {mate: SampledToken(7)}, {bad: FinishReason.ERROR})

    assert set(step(scheduler).blocks_to_zero) == held - shared
    scheduler.abort(mate, FinishReason.CANCELLED)
    arrive(scheduler, "r3", [5])
    assert set(step(scheduler).blocks_to_zero) == shared
    assert serve(scheduler, "r2", [1] * 9).num_cached_tokens == 0


@pytest.mark.parametrize(
    "reason", [FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR], ids=lambda one: one.value
)
@pytest.mark.parametrize("where", ["running", "preempted", "in flight"])
def test_what_ends_before_a_finite_row_was_sampled_leaves_nothing_to_find(
    reason: FinishReason, where: str
) -> None:
    """Its chunks are published as they are written; if they are not finite, all who find them fail."""
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=8, max_num_seqs=1)
    sequence = arrive(scheduler, "r1", list(range(1, 21)))
    cache = scheduler.block_manager.prefix_cache
    step(scheduler)
    assert len(cache) == 2
    if where == "preempted":
        urgent = Sequence("r2", [50], SamplingParams(), arrival_time=2.0, priority=0)
        scheduler.add_sequence(urgent)
        step(scheduler, urgent)
        assert sequence.num_preemptions == 1
        assert len(cache) == 2, "found again, if it goes on"
    elif where == "in flight":
        outputs = scheduler.schedule()

    scheduler.abort(sequence, reason)

    assert len(cache) == scheduler.block_manager.num_cached_blocks == 0
    if where == "in flight":
        scheduler.update(outputs, {}, {})
        assert len(cache) == 0
    assert scheduler.block_manager.num_free_blocks == 16
    later = serve_beside(scheduler, "r3", list(range(1, 21)))
    assert later.num_cached_tokens == 0
    scheduler.abort(later, FinishReason.CANCELLED)
    assert serve_beside(scheduler, "r4", list(range(1, 21))).num_cached_tokens == 16, (
        "a finite row was sampled"
    )


def test_what_a_finite_row_was_sampled_from_stays_findable_after_a_cancel() -> None:
    scheduler = build(max_num_batched_tokens=8)
    sequence = arrive(scheduler, "r0", list(range(1, 13)))
    while sequence.num_output_tokens < 6:
        step(scheduler)

    scheduler.abort(sequence, FinishReason.CANCELLED)

    assert serve(scheduler, "r1", [*sequence.token_ids[:16], 5]).num_cached_tokens == 16


def test_a_finite_row_vouches_for_what_it_found_also_when_the_writer_is_cancelled() -> None:
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=4, max_num_prefill_seqs=2)
    writer = arrive(scheduler, "r0", list(range(1, 21)))
    step(scheduler)
    finder = arrive(scheduler, "r1", [*range(1, 5), 50])
    step(scheduler)
    assert (finder.num_cached_tokens, finder.num_output_tokens) == (4, 1)

    scheduler.abort(writer, FinishReason.CANCELLED)
    scheduler.abort(finder, FinishReason.CANCELLED)

    assert serve(scheduler, "r2", list(range(1, 21))).num_cached_tokens == 4, (
        "the rest was never sampled from"
    )


def test_one_that_fails_on_blocks_of_another_that_has_not_sampled_takes_them_out() -> None:
    """The writer still computes its prompt, and may be the last to notice."""
    scheduler = build(max_num_batched_tokens=8, max_chunk_tokens=4, max_num_prefill_seqs=2)
    writer = arrive(scheduler, "r0", list(range(1, 29)))
    step(scheduler)
    finder = arrive(scheduler, "r1", [*range(1, 5), 50])
    outputs = scheduler.schedule()
    assert finder.num_cached_tokens == 4
    scheduler.update(outputs, {}, {finder: FinishReason.ERROR})

    assert serve_beside(scheduler, "r2", [*range(1, 5), 60]).num_cached_tokens == 0
    assert not writer.is_finished()


def test_one_that_fails_before_its_first_row_takes_out_all_that_it_found() -> None:
    """A row of an earlier request does not read all layers of a block that is out of its window."""
    scheduler = build()
    serve(scheduler, "r0", [1] * 9)
    failing = arrive(scheduler, "r1", [1] * 9)
    outputs = scheduler.schedule()
    assert failing.num_cached_tokens == 8
    scheduler.update(outputs, {}, {failing: FinishReason.ERROR})

    assert serve(scheduler, "r2", [1] * 9).num_cached_tokens == 0


def test_one_that_fails_after_a_finite_row_leaves_what_it_found() -> None:
    scheduler = build()
    serve(scheduler, "r0", [1] * 9)
    failing = arrive(scheduler, "r1", [1] * 9)
    step(scheduler)
    scheduler.update(scheduler.schedule(), {}, {failing: FinishReason.ERROR})

    assert serve(scheduler, "r2", [1] * 9).num_cached_tokens == 8


def test_off_is_off() -> None:
    scheduler = build(prefix_caching=False)
    serve(scheduler, "r0", [1] * 9)

    assert serve(scheduler, "r1", [1] * 9).num_cached_tokens == 0
    assert scheduler.block_manager.num_cached_blocks == 0


def test_a_shared_prefix_is_free_only_when_nobody_holds_it() -> None:
    scheduler = build()
    serve(scheduler, "r0", [1] * 9)
    first, second = arrive(scheduler, "r1", [1] * 9), arrive(scheduler, "r2", [1] * 9)
    step(scheduler)
    shared = first.block_table[0]
    assert scheduler.block_manager.reference_count(shared) == 2

    scheduler.abort(first, FinishReason.CANCELLED)
    assert scheduler.block_manager.reference_count(shared) == 1
    scheduler.abort(second, FinishReason.CANCELLED)
    assert scheduler.block_manager.num_free_blocks == 16
