"""The engine's step with a scripted device: ends, resuming, cancelling, faults and reports."""

import pytest

from engine.config import EngineConfig
from engine.errors import DeviceLost, EngineDead, InvalidParameter, NeverFits
from engine.outputs import FinishedSequence, SchedulerOutputs, WaitingReason
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.fakes import EOS, Clock, ScriptedRunner, add, build_engine, run


def test_the_first_token_may_be_the_last() -> None:
    engine, _ = build_engine(ScriptedRunner({"eos": [EOS]}))
    add(engine, "one", 3, max_tokens=1)
    add(engine, "eos", 3, max_tokens=9)

    assert run(engine) == {"one": ([100], "<100>", "length"), "eos": ([EOS], "", "stop")}
    assert engine.scheduler.running_queue == []


def test_every_end_that_a_token_can_bring() -> None:
    runner = ScriptedRunner({"stop_id": [5, 6, 7], "stop_str": [5, 6, 7], "ignores": [EOS, 8, EOS]})
    engine, _ = build_engine(runner)
    add(engine, "stop_id", 2, max_tokens=9, stop_token_ids=(6,))
    add(engine, "stop_str", 2, max_tokens=9, stop=("6><",))
    add(engine, "ignores", 2, max_tokens=3, ignore_eos=True)

    assert run(engine) == {
        "stop_id": ([5, 6], "<5>", "stop"),
        "stop_str": ([5, 6, 7], "<5><", "stop"),
        "ignores": ([EOS, 8, EOS], "<8>", "length"),
    }


@pytest.mark.parametrize(("prompt_len", "num_tokens"), [(47, 1), (46, 2)])
def test_the_models_length_ends_a_sequence(prompt_len: int, num_tokens: int) -> None:
    """vllm#23683: a prompt one short of the model's length has room for exactly one token."""
    engine, _ = build_engine()
    add(engine, "a", prompt_len, max_tokens=10)

    tokens, _, end = run(engine)["a"]

    assert (len(tokens), end) == (num_tokens, "length")


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length_and_is_never_preempted() -> None:
    """vllm#39734: it preempted itself for ever."""
    engine, _ = build_engine(num_kv_blocks=2)
    add(engine, "a", 5)

    tokens, _, end = run(engine, max_steps=10)["a"]

    assert end == "length"
    assert len(tokens) == 4, "8 tokens are computed; the ninth is drawn from the eighth"


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8])
@pytest.mark.parametrize("joined", [False, True])
def test_prompts_at_the_edge_of_a_block_end_in_time(prompt_len: int, joined: bool) -> None:
    """FastDeploy#3288: a prompt of exactly k blocks stalled at batch 1, or lost its second block."""
    engine, runner = build_engine()
    add(engine, "a", prompt_len, max_tokens=6)
    engine.step()
    if joined:
        add(engine, "b", 5, max_tokens=2)

    result = run(engine, max_steps=8)

    assert result["a"][0] == [101, 102, 103, 104, 105]
    computed = [(start, n) for step in runner.steps for who, start, n in step if who == "a"]
    assert computed == [(0, prompt_len)] + [(prompt_len + n, 1) for n in range(5)]


def test_preemption_changes_nothing_that_is_told() -> None:
    engine, _ = build_engine(num_kv_blocks=8, max_num_batched_tokens=9)
    preempted: list[Sequence] = []
    make_room = engine.scheduler._make_room
    engine.scheduler._make_room = lambda one: preempted.extend(gone := make_room(one)) or gone  # type: ignore[method-assign,func-returns-value]
    for name in "abcdef":
        add(engine, name, 5, max_tokens=12)

    result = run(engine)

    assert result == {name: (list(range(100, 112)), words(range(100, 112)), "length") for name in "abcdef"}
    assert preempted


def test_a_resumed_request_goes_on_after_its_tokens_and_repeats_no_text() -> None:
    engine, runner = build_engine()
    params = SamplingParams(max_tokens=5)
    engine.add("a", [1, 2, 3], params, arrival=0.0, output_token_ids=[100, 101])

    assert run(engine) == {"a": ([102, 103, 104], words([102, 103, 104]), "length")}
    assert runner.steps[0] == [("a", 0, 5)]


@pytest.mark.parametrize(
    ("output", "params", "end"),
    [
        ([100, 101], {"max_tokens": 2}, "length"),
        ([100, EOS], {"max_tokens": 9}, "stop"),
        ([100, 101], {"max_tokens": 9, "stop": ("101",)}, "stop"),
    ],
)
def test_a_resumed_request_that_was_at_its_end_only_ends(
    output: list[int], params: dict[str, object], end: str
) -> None:
    engine, runner = build_engine()
    engine.add("a", [1], SamplingParams(**params), arrival=0.0, output_token_ids=output)  # type: ignore[arg-type]

    assert run(engine) == {"a": ([], "", end)}
    assert runner.steps == []


def test_text_held_at_the_crash_is_told_by_the_next_engine() -> None:
    engine, _ = build_engine()
    params = SamplingParams(max_tokens=2, stop=("<100><7",))
    engine.add("a", [1], params, arrival=0.0, output_token_ids=[100])

    assert run(engine) == {"a": ([101], "<100><101>", "length")}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancel_ends_exactly_one_request_in_every_state(steps: int) -> None:
    engine, _ = build_engine(max_num_batched_tokens=4)
    add(engine, "other", 2, max_tokens=6)
    add(engine, "a", 9, max_tokens=6)
    for _ in range(steps):
        engine.step()

    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert not engine.cancel("unknown")

    result = run(engine)
    assert result["a"][2] == "cancelled"
    assert result["other"][2] == "length"
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_a_discarded_request_is_never_heard_of_again() -> None:
    engine, _ = build_engine()
    add(engine, "a", 3, max_tokens=4)
    add(engine, "b", 3, max_tokens=4)
    engine.step()

    assert engine.discard("a")
    assert not engine.discard("a")

    reports = [engine.step().report for _ in range(4)]
    assert [one.reason for report in reports for one in report.finished] == ["length"]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1000], {}, "prompt"),
        ([5279552648203111001], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1], {"stop_token_ids": (99999,)}, "stop_token_ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_leaves_nothing(
    prompt: list[int], params: dict[str, object], field: str
) -> None:
    """vllm#9634, vllm#54195: ids outside the vocabulary crashed the forward pass or wrote elsewhere."""
    engine, _ = build_engine()

    with pytest.raises(InvalidParameter) as refused:
        engine.add("a", prompt, SamplingParams(**params), arrival=0.0)  # type: ignore[arg-type]

    assert refused.value.field == field
    assert not engine.has_work
    assert not engine.cancel("a")


def test_what_never_fits_is_refused_and_the_next_is_served() -> None:
    """vllm#35541: with 8 blocks, a prompt of 40 tokens blocked all behind it."""
    engine, _ = build_engine(num_kv_blocks=8)

    with pytest.raises(NeverFits, match="32"):
        add(engine, "big", 40)
    add(engine, "small", 3, max_tokens=2)

    assert run(engine) == {"small": ([100, 101], words([100, 101]), "length")}


def test_one_request_s_fault_in_the_sampler_is_its_own() -> None:
    """mstar#207: one request's exception failed the batch."""
    runner = ScriptedRunner()

    def fault(sequence: Sequence) -> None:
        if sequence.request_id == "b" and sequence.num_output_tokens == 1:
            raise KeyError("a penalty went wrong")

    runner.sample_fault = fault
    engine, _ = build_engine(runner)
    for name in "abcd":
        add(engine, name, 3, max_tokens=3)

    result = run(engine)

    assert result["b"] == ([100], "<100>", "error")
    for name in "acd":
        assert result[name] == ([100, 101, 102], words([100, 101, 102]), "length")


def test_out_of_memory_is_tried_again_with_smaller_batches() -> None:
    """vllm#5822: a forward pass that ran out of memory ended the loop."""
    runner = ScriptedRunner()

    def fault(outputs: SchedulerOutputs) -> None:
        if len(outputs.scheduled) > 2:
            raise MemoryError

    runner.fault = fault
    engine, _ = build_engine(runner)
    for name in "abcd":
        add(engine, name, 3, max_tokens=2)

    assert run(engine) == {name: ([100, 101], words([100, 101]), "length") for name in "abcd"}


def test_a_tokenizer_that_fails_on_a_token_fails_that_request() -> None:
    engine, _ = build_engine(ScriptedRunner({"b": [100, 666]}))
    decode = engine._tokenizer.decode

    def broken(token_ids: list[int]) -> str:
        if 666 in token_ids:
            raise UnicodeError("no such token")
        return decode(token_ids)

    engine._tokenizer.decode = broken  # type: ignore[method-assign]
    add(engine, "a", 3, max_tokens=3)
    add(engine, "b", 3, max_tokens=3)

    result = run(engine)

    assert result["a"][2] == "length"
    assert result["b"] == ([100], "<100>", "error")


def test_a_failure_of_everything_is_the_devices_and_the_engine_is_dead() -> None:
    engine, runner = build_engine()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    runner.fault = runner.check = broken
    add(engine, "a", 3)
    add(engine, "b", 3)

    with pytest.raises(EngineDead):
        engine.step()


def test_a_request_that_always_fails_is_failed_where_the_device_still_works() -> None:
    engine, runner = build_engine()

    def broken(_: object) -> None:
        raise RuntimeError("a bad prompt")

    runner.fault = broken
    add(engine, "a", 3)

    (output,) = engine.step().outputs

    assert output.finish_reason is not None
    assert output.finish_reason.value == "error"
    assert output.error == "RuntimeError: a bad prompt"


def test_a_lost_device_is_not_blamed_on_anybody() -> None:
    engine, runner = build_engine()

    def lost(_: object) -> None:
        raise DeviceLost("an illegal memory access")

    runner.fault = lost
    add(engine, "a", 3)

    with pytest.raises(EngineDead, match="illegal memory access"):
        engine.step()


def test_the_line_tells_position_tokens_ahead_and_reason() -> None:
    engine, _ = build_engine(max_num_seqs=1)
    add(engine, "a", 4, max_tokens=9)
    add(engine, "b", 5, max_tokens=3)
    add(engine, "c", 6, max_tokens=3)
    engine.step()

    told = [(one.request_id, one.position, one.tokens_ahead, one.reason) for one in engine.waiting()]
    assert told == [("b", 1, 1, WaitingReason.SEQ_BUDGET), ("c", 2, 9, WaitingReason.BEHIND)]


def test_a_report_counts_each_event_once() -> None:
    """vllm#31503, vllm#15167: ends and first tokens were counted elsewhere than their tokens."""
    clock = Clock()
    engine, runner = build_engine(clock=clock, max_num_batched_tokens=4)

    def tick(_: object) -> None:
        clock.now += 1.0

    runner.fault = tick
    add(engine, "chunked", 10, max_tokens=3)
    add(engine, "short", 2, max_tokens=1)
    add(engine, "gone", 2, max_tokens=1)
    engine.cancel("gone")

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    first_tokens = [seconds for one in reports for seconds in one.first_token_seconds]
    assert first_tokens == [3.0, 3.0], "the whole of three chunks; the short prompt had to wait for two"
    assert [s for one in reports for s in one.inter_token_seconds] == [1.0, 1.0]
    finished = {one.num_prompt_tokens: one for report in reports for one in report.finished}
    assert {one.reason for report in reports for one in report.finished} == {"length", "cancelled"}
    assert finished[10] == FinishedSequence(
        reason="length",
        num_prompt_tokens=10,
        num_output_tokens=3,
        num_preemptions=0,
        seconds=5.0,
        first_token_seconds=3.0,
    )
    assert sum(one.num_generated_tokens for one in reports) == 4
    assert sum(one.num_prefill_tokens for one in reports) == 12
    assert sum(one.num_decode_tokens for one in reports) == 2


def test_a_resumed_request_waits_and_starts_only_once() -> None:
    engine, _ = build_engine()
    engine.add("a", [1, 2], SamplingParams(max_tokens=4), arrival=0.0, output_token_ids=[100])

    reports = []
    while engine.has_work:
        reports.append(engine.step().report)

    assert [one for report in reports for one in report.first_token_seconds] == []
    assert [one for report in reports for one in report.queue_seconds] == []
    assert sum(len(report.inter_token_seconds) for report in reports) == 2
    (finished,) = reports[-1].finished
    assert (finished.first_token_seconds, finished.num_output_tokens) == (None, 4)


def test_time_spent_in_line_elsewhere_counts() -> None:
    engine, _ = build_engine()
    engine.add("a", [1], SamplingParams(max_tokens=1), arrival=0.0, waited_seconds=5.0)

    report = engine.step().report

    assert report.queue_seconds == report.first_token_seconds == (5.0,)
    assert report.finished[0].seconds == 5.0


def test_a_cancel_of_all_leaves_an_empty_report() -> None:
    """vllm#22545: gauges kept their last values when everything had been aborted."""
    engine, _ = build_engine()
    for name in "abcdef":
        add(engine, name, 3)
    engine.step()
    for name in "abcdef":
        engine.cancel(name)

    report = engine.step().report

    assert not engine.has_work
    assert (report.num_running, report.num_waiting) == (0, 0)
    assert report.num_free_kv_blocks == report.num_kv_blocks
    assert [one.reason for one in report.finished] == ["cancelled"] * 6


def test_nothing_leaks_over_many_requests_of_every_fate() -> None:
    """xllm#828: usage passed 100 % after enough cancels."""
    runner = ScriptedRunner({f"r{n}": [EOS] for n in range(0, 200, 5)})
    engine, _ = build_engine(runner, max_num_batched_tokens=8, max_num_seqs=3)

    def fault(sequence: Sequence) -> None:
        if int(sequence.request_id[1:]) % 7 == 3:
            raise ValueError("bad")

    runner.sample_fault = fault
    ends = 0
    for n in range(200):
        add(engine, f"r{n}", 1 + n % 13, max_tokens=1 + n % 4)
        if n % 3 == 0:
            engine.cancel(f"r{max(0, n - 2)}")
        report = engine.step().report
        ends += len(report.finished)
        assert 0 <= report.num_free_kv_blocks <= report.num_kv_blocks
    while engine.has_work:
        ends += len(engine.step().report.finished)

    assert ends == 200
    assert engine.scheduler.block_manager.num_free_blocks == 16
    assert engine._requests == {}


@pytest.mark.parametrize(
    "field",
    [
        "max_model_len",
        "num_kv_blocks",
        "block_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_num_prefill_seqs",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_limit_that_is_no_limit_is_refused_at_the_start(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        EngineConfig(**{"max_model_len": 8, "num_kv_blocks": 8, field: value})  # type: ignore[arg-type]


def words(token_ids: object) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)  # type: ignore[attr-defined]
