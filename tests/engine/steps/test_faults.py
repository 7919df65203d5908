"""Faults in forward pass, sampler and tokenizer fail only their own request."""

import pytest

from engine.errors import DeviceLost, EngineDead
from engine.outputs import SchedulerOutputs
from engine.sequence import Sequence
from tests.engine.fakes import EOS, ScriptedRunner, WordTokenizer, add, build_engine, run, words


def test_a_sampler_fault_fails_only_its_request() -> None:
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


def test_out_of_memory_is_retried_with_smaller_batches() -> None:
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


def test_a_tokenizer_error_fails_only_its_request() -> None:
    class Broken(WordTokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            if 666 in token_ids:
                raise UnicodeError("no such token")
            return super().decode(token_ids, skip_special_tokens)

    engine, _ = build_engine(ScriptedRunner({"b": [100, 666]}), tokenizer=Broken())
    add(engine, "a", 3, max_tokens=3)
    add(engine, "b", 3, max_tokens=3)

    result = run(engine)

    assert result["a"][2] == "length"
    assert result["b"] == ([100], "<100>", "error")


def test_if_every_request_fails_and_the_check_too_the_engine_is_dead() -> None:
    engine, runner = build_engine()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    runner.fault = runner.check = broken
    add(engine, "a", 3)
    add(engine, "b", 3)

    with pytest.raises(EngineDead):
        engine.step()


def test_a_request_that_always_fails_is_failed_if_the_device_works() -> None:
    engine, runner = build_engine()

    def broken(_: object) -> None:
        raise RuntimeError("a bad prompt")

    runner.fault = broken
    add(engine, "a", 3)

    (output,) = engine.step().outputs

    assert output.finish_reason is not None
    assert output.finish_reason.value == "error"
    assert output.error == "RuntimeError: a bad prompt"


def test_a_lost_device_fails_no_request() -> None:
    engine, runner = build_engine()

    def lost(_: object) -> None:
        raise DeviceLost("an illegal memory access")

    runner.fault = lost
    add(engine, "a", 3)

    with pytest.raises(EngineDead, match="illegal memory access"):
        engine.step()


def test_nothing_leaks_over_many_requests() -> None:
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
    assert engine.num_tracked == 0


def test_a_bisected_step_zeroes_no_block_that_a_part_has_written() -> None:
    """Blocks zeroed after one fault and reused in the next must not be zeroed again between the parts."""
    runner = ScriptedRunner()
    bad = {"x", "y"}

    def fault(sequence: Sequence) -> None:
        if sequence.request_id in bad:
            raise ValueError("bad")

    zeroed: list[tuple[int, ...]] = []
    runner.sample_fault = fault
    runner.fault = lambda outputs: zeroed.append(outputs.blocks_to_zero)
    engine, _ = build_engine(runner, num_kv_blocks=4)
    add(engine, "x", 8, max_tokens=2)
    engine.step()
    add(engine, "a", 4, max_tokens=2)
    add(engine, "y", 4, max_tokens=2)

    engine.step()

    assert zeroed == [(), (1, 2), (1, 2), ()], "x; then a and y together, a alone, y alone"


def test_no_memory_for_any_of_several_requests_is_a_device_fault() -> None:
    engine, runner = build_engine()

    def starve(_: object) -> None:
        raise MemoryError("in use by another process")

    runner.fault = starve
    add(engine, "a", 3)
    add(engine, "b", 3)

    with pytest.raises(EngineDead, match="memory"):
        engine.step()


def test_no_memory_for_a_single_request_fails_it() -> None:
    engine, runner = build_engine()

    def starve(outputs: SchedulerOutputs) -> None:
        if "big" in {item.sequence.request_id for item in outputs.scheduled}:
            raise MemoryError

    runner.fault = starve
    add(engine, "big", 9, max_tokens=2)
    add(engine, "small", 3, max_tokens=2)

    result = run(engine)

    assert result["big"] == ([], "", "error")
    assert result["small"][2] == "length"


def test_held_text_is_reported_when_a_request_fails() -> None:
    runner = ScriptedRunner()

    def fault(sequence: Sequence) -> None:
        if sequence.num_output_tokens == 2:
            raise ValueError("bad")

    runner.sample_fault = fault
    engine, _ = build_engine(runner)
    add(engine, "a", 3, stop=("<100><101><7",))

    assert run(engine) == {"a": ([100, 101], "<100><101>", "error")}
