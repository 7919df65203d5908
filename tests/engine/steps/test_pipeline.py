"""Steps launched ahead: their order, and when none is launched."""

import pytest

from engine.errors import DeviceLost, EngineDead
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.requests.deadlines import Deadlines
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import EOS, Clock, ScriptedExecutor, ScriptedRunner, add, build_engine, run, words
from tests.engine.requests.grammars import Countdown, ScriptedCompiler


class SamplesNoLogprobs(ScriptedExecutor):
    """Like the real executor, launches chunks of a request with logprobs, but not the last one."""

    def can_launch(self, item: ScheduledSequence) -> bool:
        return not item.samples or item.sequence.params.logprobs is None


def executor_of(scripts: dict[str, list[int]] | None = None) -> ScriptedExecutor:
    return ScriptedExecutor(ScriptedRunner(scripts))


def test_a_step_is_launched_before_the_previous_one_is_fetched() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=3)

    reported = [[one.token_id for one in engine.step().outputs] for _ in range(3)]

    assert reported == [[100], [101], [102]]
    assert executor.events == [
        ("launch", 1), ("launch", 2), ("fetch", 1), ("launch", 3), ("fetch", 2), ("fetch", 3),
    ]  # fmt: skip
    assert not engine.has_work


def test_the_device_computes_sampled_tokens_before_the_host_knows_them() -> None:
    executor = executor_of({"a": [7, 8, 9, 10], "b": [17, 18, 19], "c": [27, EOS]})
    engine, _ = build_engine(executor=executor, max_num_batched_tokens=6)
    for name in "abc":
        add(engine, name, 4, max_tokens=4 if name == "a" else 3)

    run(engine)

    computed = {
        name: [token_id for position, token_id in sorted(seen.items()) if position >= 4]
        for (name, _), seen in executor.seen.items()
    }
    assert computed == {"a": [7, 8, 9], "b": [17, 18], "c": [27, EOS]}, (
        "the finish of c was detected a step later"
    )


def test_tokens_in_flight_of_a_stopped_request_are_dropped() -> None:
    executor = executor_of({"a": [100, EOS, 555], "b": [200, 201, 202, 203]})
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=9)
    add(engine, "b", 3, max_tokens=4)

    generated, results = 0, []
    while engine.has_work:
        step = engine.step()
        generated += step.report.num_generated_tokens
        results += [(one.request_id, one.token_id, one.finish_reason) for one in step.outputs]

    assert [token for name, token, _ in results if name == "a"] == [100, EOS]
    assert [token for name, token, _ in results if name == "b"] == [200, 201, 202, 203]
    assert generated == 6
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_no_step_is_launched_after_the_last_token() -> None:
    """Limits on length are known before the token is."""
    executor = executor_of()
    engine, runner = build_engine(executor=executor, max_model_len=8, num_kv_blocks=4)
    add(engine, "a", 3, max_tokens=2)
    add(engine, "b", 5)

    assert run(engine) == {
        "a": ([100, 101], words([100, 101]), "length"),
        "b": ([100, 101, 102], words([100, 101, 102]), "length"),
    }
    assert runner.steps == [
        [("a", 0, 3), ("b", 0, 5)],
        [("a", 3, 1), ("b", 5, 1)],
        [("b", 6, 1)],
    ]


def test_a_request_cancelled_in_flight_gets_no_tokens_and_frees_its_blocks() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=9)
    add(engine, "b", 3, max_tokens=3)
    engine.step()

    engine.cancel("a")
    reported = [(one.request_id, one.token_id) for one in engine.step().outputs]

    assert reported == [("b", 101), ("a", None)]
    assert run(engine)["b"][0] == [102]
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_after_all_requests_are_gone_the_next_one_starts_at_once() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=9)
    engine.step()
    engine.discard("a")
    assert not engine.has_work

    add(engine, "b", 3, max_tokens=1)

    (output,) = engine.step().outputs
    assert (output.request_id, output.token_id) == ("b", 100)


def test_a_request_with_a_grammar_makes_its_batch_synchronous() -> None:
    compiler = ScriptedCompiler()
    executor = executor_of()
    engine, _ = build_engine(executor=executor, grammar_compiler=compiler)
    add(engine, "a", 3, max_tokens=8)
    add(engine, "g", 3, max_tokens=4, structured_outputs=StructuredOutputs(regex="a"))
    engine.step()
    compiler.finish(lambda: Countdown(2))
    num_launched: list[int] = []

    while engine.has_request("g"):
        engine.step()
        num_launched.append(sum(kind == "launch" for kind, _ in executor.events))
    result = run(engine)

    assert num_launched[-1] == num_launched[-2] == num_launched[0], "no launches while the grammar is used"
    assert result["a"][2] == "length"
    assert executor.events[-1][0] == "fetch"
    assert sum(kind == "launch" for kind, _ in executor.events) > num_launched[-1], "steps overlap again"


def test_a_step_that_may_preempt_is_not_scheduled_ahead() -> None:
    """A running request may finish first, so that no preemption is needed."""
    executor = executor_of({"a": [100] * 3 + [EOS], "b": list(range(200, 220))})
    engine, _ = build_engine(executor=executor, num_kv_blocks=3)
    add(engine, "a", 4, max_tokens=9)
    add(engine, "b", 4, max_tokens=6)
    num_preempted = 0

    while engine.has_work:
        num_preempted += engine.step().report.num_preempted

    in_order, _ = build_engine(executor.runner, num_kv_blocks=3)
    add(in_order, "a", 4, max_tokens=9)
    add(in_order, "b", 4, max_tokens=6)
    expected = 0
    while in_order.has_work:
        expected += in_order.step().report.num_preempted
    assert num_preempted == expected > 0


def test_the_head_of_the_queue_gets_a_slot_while_steps_overlap() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor, max_num_seqs=1)
    add(engine, "patient", 4, max_tokens=12, priority=3)
    engine.step()
    add(engine, "urgent", 4, max_tokens=3, priority=1)
    ends, num_preempted = [], 0

    while engine.has_work:
        step = engine.step()
        num_preempted += step.report.num_preempted
        ends += [one.request_id for one in step.outputs if one.finish_reason]

    assert (ends, num_preempted) == (["urgent", "patient"], 1)


@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_a_fault_of_a_step_launched_ahead_fails_only_its_request(where: str) -> None:
    executor = executor_of()
    engine, runner = build_engine(executor=executor)
    for name in "abcd":
        add(engine, name, 3, max_tokens=5)

    def fault(outputs: SchedulerOutputs) -> None:
        if any(one.sequence.request_id == "b" and one.start == 5 for one in outputs.scheduled):
            raise KeyError("bad")

    # Executed in order, it fails again.
    runner.fault = fault
    if where == "launch":
        executor.fault = fault
    else:
        executor.fetch_fault = fault

    result = run(engine)

    assert result["b"] == ([100, 101, 102], words([100, 101, 102]), "error")
    for name in "acd":
        assert result[name][0] == [100, 101, 102, 103, 104]
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_a_step_launched_after_a_failed_one_is_executed_again() -> None:
    executor = executor_of({"a": list(range(300, 306))})
    engine, runner = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=6)
    failures = iter([None, MemoryError("busy")])

    def fail_once(_: SchedulerOutputs) -> None:
        if error := next(failures, None):
            raise error

    executor.fetch_fault = fail_once

    assert run(engine)["a"][0] == list(range(300, 306))
    starts = [start for ((_, start, _),) in runner.steps]
    assert starts == [0, 3, 4, 3, 4, 5, 6, 7], "the second step failed after the third was launched"


def test_blocks_are_zeroed_after_their_step_lost_all_requests() -> None:
    executor = executor_of({"x": [-1], "y": [100, EOS]})
    engine, _ = build_engine(executor=executor)
    add(engine, "x", 4, max_tokens=3)
    add(engine, "y", 3, max_tokens=9)
    reported = engine.step().outputs
    assert [one.error for one in reported if one.request_id == "x"] == ["the logits are not finite"]
    to_zero: list[tuple[int, ...]] = []

    def fail_once(outputs: SchedulerOutputs) -> None:
        to_zero.append(outputs.blocks_to_zero)
        if len(to_zero) == 1:
            raise MemoryError("busy")

    executor.fault = fail_once
    engine.step()  # y finishes; the failed step had no other request
    add(engine, "z", 3, max_tokens=1)
    engine.step()

    assert to_zero[0]
    assert to_zero == [to_zero[0]] * 2


def test_a_lost_device_ends_the_engine_when_detected() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3)
    engine.step()

    def lost(_: object) -> None:
        raise DeviceLost("an illegal memory access")

    executor.fetch_fault = lost

    with pytest.raises(EngineDead, match="illegal memory access"):
        engine.step()


def test_a_drained_engine_has_nothing_in_flight_and_loses_nothing() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=4)
    add(engine, "b", 3, max_tokens=4)
    engine.step()

    engine.drain()
    engine.drain()

    launched = [number for kind, number in executor.events if kind == "launch"]
    fetched = [number for kind, number in executor.events if kind == "fetch"]
    assert launched == fetched
    reported = [(one.request_id, one.token_id) for one in engine.step(isolate_request_id="b").outputs]
    assert reported == [("a", 101), ("b", 101)], "the step in flight has tokens of both"
    reported = [(one.request_id, one.token_id) for one in engine.step(isolate_request_id="b").outputs]
    assert reported == [("b", 102)]
    assert {name: tokens for name, (tokens, *_) in run(engine).items()} == {"a": [102, 103], "b": [103]}


def test_a_block_is_not_shared_before_its_step_has_finished() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor, max_num_batched_tokens=4, max_chunk_tokens=4)
    add(engine, "a", 12, max_tokens=2)
    cache = engine.scheduler.block_manager.prefix_cache
    found = []
    while engine.has_work:
        engine.step()
        found.append(len(cache))

    assert found == [1, 2, 3, 3]


def test_no_block_is_found_by_a_placeholder() -> None:
    executor = executor_of({"a": list(range(300, 320)), "b": list(range(400, 420))})
    engine, _ = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=14)
    add(engine, "b", 5, max_tokens=14)
    run(engine)

    cache = engine.scheduler.block_manager.prefix_cache
    assert len(cache) == 8
    for cached in cache.blocks.values():
        assert all(token_id >= 0 for token_id in memoryview(cached.tokens).cast("q"))


def test_no_block_is_found_by_the_step_scheduled_ahead() -> None:
    executor = executor_of()
    engine, _ = build_engine(executor=executor)
    cache = engine.scheduler.block_manager.prefix_cache
    found: list[int] = []
    executor.fault = lambda _: found.append(len(cache))
    add(engine, "a", 4, max_tokens=3)

    run(engine)

    assert found == [0, 0, 1], "the second step starts a block, and the first may still fail"


def test_followers_wait_until_the_whole_prompt_is_computed() -> None:
    executor = executor_of()
    engine, runner = build_engine(executor=executor, max_num_batched_tokens=6, max_chunk_tokens=6)
    add(engine, "a", 12, n=2, max_tokens=1)

    run(engine)

    assert runner.steps == [[("a", 0, 6)], [("a", 6, 6)], [("a", 8, 4)]]


def test_isolation_reports_tokens_in_flight_and_launches_no_more() -> None:
    executor = executor_of()
    engine, runner = build_engine(executor=executor)
    add(engine, "a", 3, max_tokens=5)
    add(engine, "b", 3, max_tokens=5)
    engine.step()
    num_steps = len(runner.steps)

    reported = [{one.request_id for one in engine.step(isolate_request_id="b").outputs} for _ in range(3)]

    assert reported == [{"a", "b"}, {"b"}, {"b"}]
    assert [{name for name, *_ in step} for step in runner.steps[num_steps:]] == [{"b"}, {"b"}]


def test_a_one_token_last_chunk_scheduled_ahead_gets_its_next_block() -> None:
    """After a preemption this chunk is a decode, and its sequence needs a block as any decode does."""
    executor = SamplesNoLogprobs(ScriptedRunner())
    engine, _ = build_engine(
        executor=executor, num_kv_blocks=4, block_size=2, max_num_batched_tokens=2, max_num_seqs=4
    )
    add(engine, "r0", 4, max_tokens=2, logprobs=1)
    add(engine, "r1", 2, max_tokens=7, logprobs=1)

    result = run(engine)

    assert result["r0"] == ([100, 101], words([100, 101]), "length")
    tokens = list(range(100, 107))
    assert result["r1"] == (tokens, words(tokens), "length")


def test_queue_time_ends_when_the_step_is_scheduled() -> None:
    clock, executor = Clock(), executor_of()
    engine, _ = build_engine(executor=executor, clock=clock)

    def tick(_: SchedulerOutputs) -> None:
        clock.now += 5.0

    executor.fetch_fault = tick
    add(engine, "a", 3, max_tokens=6)
    reports = [engine.step().report]
    clock.now = 6.0
    # Queued at 6, scheduled at 6 while a's second step runs until 11, reported at 16.
    add(engine, "b", 3, max_tokens=1, waited_seconds=1.0, deadlines=Deadlines(queue_timeout_seconds=2.0))
    steps = [engine.step(), engine.step()]
    reports += [one.report for one in steps]

    assert [one.queue_seconds for one in reports] == [((2, 0.0),), (), ((2, 1.0),)]
    assert [one.first_token_seconds for one in reports] == [((2, 5.0),), (), ((2, 11.0),)]
    assert [one.inter_token_seconds for one in reports] == [(), (6.0,), (5.0,)]
    assert [one.seconds_since_decision for one in reports] == [5.0, 11.0, 10.0]
    ends = [(one.request_id, one.finish_reason and one.finish_reason.value) for one in steps[1].outputs]
    assert ends == [("a", None), ("b", "length")], "it was scheduled before its deadline"
