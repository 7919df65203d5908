"""Steps of one request alone: the others wait where they are, and every text comes out as if undisturbed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import WaitingReason
from engine.requests.deadlines import Deadlines
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import Clock, add, build_engine, run
from tests.engine.requests.grammars import Countdown, ScriptedCompiler
from tests.engine.scheduling.harness import Bench


def computed(runner) -> set[str]:
    """Whom the last execution computed something of."""
    return {request_id for request_id, _, _ in runner.steps[-1]}


def test_the_others_keep_their_slots_and_blocks_and_are_not_stepped() -> None:
    engine, runner = build_engine()
    add(engine, "a", 4, max_tokens=8)
    add(engine, "b", 4, max_tokens=8)
    engine.step()
    add(engine, "c", 4, max_tokens=8)
    before = [(one.slot, list(one.block_table), one.num_tokens) for one in engine.scheduler.running_queue]

    for _ in range(3):
        told = engine.step("c")
        assert computed(runner) == {"c"}
        assert [output.request_id for output in told.outputs] == ["c"]

    mates = engine.scheduler.running_queue[:2]
    assert [(one.slot, one.block_table, one.num_tokens) for one in mates] == before
    engine.step()
    assert computed(runner) == {"a", "b", "c"}


def test_it_passes_those_before_it_in_line() -> None:
    engine, runner = build_engine(max_num_seqs=1)
    add(engine, "first", 4, max_tokens=8)
    add(engine, "alone", 4, max_tokens=8)
    engine.step("alone")

    assert computed(runner) == {"alone"}
    assert engine.queue_positions()[0].reason is WaitingReason.BEHIND


def test_the_last_in_order_gives_up_its_slot() -> None:
    bench = Bench(max_num_seqs=2)
    first, last = bench.add(), bench.add()
    bench.step()
    alone = bench.add()
    outputs = bench.scheduler.schedule([alone])

    assert outputs.preempted == (last,)
    assert dict(outputs.skipped)[last] is WaitingReason.SEQ_BUDGET
    assert bench.scheduler.running_queue == [first, alone]


def test_so_many_give_up_their_blocks_as_it_needs() -> None:
    bench = Bench(num_kv_blocks=8)
    a, b, c = (bench.add(prompt=7, max_tokens=1) for _ in range(3))
    bench.scheduler.schedule()
    alone = bench.add(prompt=15)
    outputs = bench.scheduler.schedule([alone])

    assert outputs.preempted == (c,), "two blocks were free and two were missing"
    assert bench.scheduler.running_queue == [a, b, alone]


def test_the_first_in_order_and_the_pinned_give_way_at_last() -> None:
    bench = Bench(num_kv_blocks=8, max_preemptions=0)
    first, second = bench.add(prompt=15, max_tokens=1), bench.add(prompt=15, max_tokens=1)
    bench.scheduler.schedule()
    assert first.is_pinned
    second.is_pinned = False
    alone = bench.add(prompt=31, max_tokens=1)
    outputs = bench.scheduler.schedule([alone])

    assert outputs.preempted == (second, first)
    assert [item.sequence for item in outputs.scheduled] == [alone]


def test_one_that_is_pinned_gives_way_after_the_others_whatever_their_order() -> None:
    bench = Bench(num_kv_blocks=8)
    first, pinned = bench.add(prompt=15, max_tokens=1), bench.add(prompt=15, max_tokens=1)
    bench.scheduler.schedule()
    pinned.is_pinned = True
    alone = bench.add(prompt=15, max_tokens=1)

    assert bench.scheduler.schedule([alone]).preempted == (first,)


def test_nobody_gives_way_for_what_a_step_has_no_budget_for() -> None:
    bench = Bench(max_num_prefill_seqs=1)
    mate = bench.add()
    bench.step()
    outputs = bench.step(one := bench.add(), other := bench.add())

    assert [item.sequence for item in outputs.scheduled] == [one]
    assert dict(outputs.skipped) == {other: WaitingReason.PREFILL_BUDGET}
    assert mate in bench.scheduler.running_queue


def test_its_own_that_wait_take_no_blocks_in_a_step_that_took_some() -> None:
    """What another of its outputs gave room to, in turn, would be lost to the first."""
    bench = Bench(num_kv_blocks=6)
    mate, last, one = (bench.add(prompt=7) for _ in range(3))
    bench.step()
    bench.step(one)
    other = bench.add(prompt=3)
    outputs = bench.step(one, other)

    assert outputs.preempted == (last,)
    assert [item.sequence for item in outputs.scheduled] == [one]
    assert dict(outputs.skipped)[other] is WaitingReason.KV_BLOCKS
    assert mate in bench.scheduler.running_queue


def test_the_others_lose_before_its_own_do() -> None:
    bench = Bench(num_kv_blocks=6)
    mate, one, other = (bench.add(prompt=7) for _ in range(3))
    bench.step()
    bench.step(one, other)

    assert bench.step(one, other).preempted == (mate,)


def test_nobody_takes_a_slot_beside_it() -> None:
    bench = Bench(max_num_seqs=2)
    alone, mate = bench.add(), bench.add()
    bench.step()
    urgent = bench.add(priority=0)
    outputs = bench.step(alone)

    assert outputs.preempted == ()
    assert mate in bench.scheduler.running_queue
    assert urgent in bench.scheduler.waiting_queue


def test_it_takes_blocks_while_it_decodes() -> None:
    bench = Bench(num_kv_blocks=4, block_size=4)
    mate, alone = bench.add(prompt=7), bench.add(prompt=7)
    bench.step()
    assert bench.step(alone).preempted == ()
    outputs = bench.step(alone)

    assert [item.sequence for item in outputs.scheduled] == [alone]
    assert outputs.preempted == (mate,)
    assert mate in bench.scheduler.waiting_queue
    bench.run_out()


def test_a_promoted_one_passes_its_promotion_to_nobody() -> None:
    bench = Bench(max_waiting_seconds=5.0, max_num_seqs=1, ageing_seconds=None)
    old = bench.add()
    bench.clock.now = 10.0
    alone = bench.add()
    bench.scheduler.schedule([alone])

    assert not alone.is_promoted
    assert old in bench.scheduler.waiting_queue


def test_a_request_that_is_not_there_steps_nobody() -> None:
    engine, runner = build_engine()
    add(engine, "a", 4, max_tokens=3)
    engine.step()
    num_steps = len(runner.steps)

    assert not engine.has_request("gone")
    assert engine.has_request("a")
    assert engine.step("gone").outputs == ()
    assert len(runner.steps) == num_steps


def test_ends_of_others_are_told_and_their_time_runs() -> None:
    clock = Clock()
    engine, runner = build_engine(clock=clock)
    add(engine, "a", 4, max_tokens=8)
    add(engine, "late", 4, max_tokens=8, deadlines=Deadlines(timeout_seconds=5.0))
    engine.step()
    add(engine, "alone", 4, max_tokens=8)
    engine.cancel("a")
    clock.now = 6.0
    told = engine.step("alone")

    ends = {one.request_id: one.finish_reason.value for one in told.outputs if one.finish_reason}
    assert ends == {"a": "cancelled", "late": "timeout"}
    assert computed(runner) == {"alone"}


def test_all_its_outputs_take_part() -> None:
    engine, runner = build_engine()
    add(engine, "a", 4, max_tokens=3)
    engine.step()
    add(engine, "alone", 5, max_tokens=3, n=3)
    indexes = [one.index for _ in range(6) for one in engine.step("alone").outputs]

    assert sorted(indexes) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not engine.has_request("alone")
    assert all(computed_ids == {"alone"} for computed_ids in map(as_set, runner.steps[1:]))


def as_set(step) -> set[str]:
    return {request_id for request_id, _, _ in step}


def test_one_whose_grammar_is_not_there_yet_waits_without_spinning() -> None:
    """The others run, and are not stepped: a turn must not come round at once all the same."""
    compiler = ScriptedCompiler()
    engine, runner = build_engine(grammar_compiler=compiler)
    add(engine, "a", 4, max_tokens=8)
    engine.step()
    add(engine, "alone", 4, max_tokens=8, structured_outputs=StructuredOutputs(regex="a"))
    num_steps = len(runner.steps)
    for _ in range(3):
        engine.step("alone")

    assert compiler.num_waits == 3
    assert len(runner.steps) == num_steps
    compiler.finish(lambda: Countdown(2))
    engine.step("alone")
    assert compiler.num_waits == 4
    assert computed(runner) == {"alone"}
    engine.step("alone")
    assert not engine.has_request("alone")


@pytest.mark.parametrize("only", [None, "alone"])
def test_grammars_of_others_cost_no_wait_while_there_is_something_to_do(only: str | None) -> None:
    compiler = ScriptedCompiler()
    engine, _ = build_engine(grammar_compiler=compiler)
    add(engine, "compiling", 4, max_tokens=8, structured_outputs=StructuredOutputs(regex="a"))
    add(engine, "alone", 4, max_tokens=8)
    engine.step(only)
    engine.step(only)

    assert compiler.num_waits == 0


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(1, 2)), min_size=2, max_size=5),
    st.lists(st.integers(-1, 4), max_size=20),
    st.integers(12, 16),
    st.integers(1, 4),
)
def test_every_text_is_the_undisturbed_one(
    asked: list[tuple[int, int, int]], steps: list[int], num_kv_blocks: int, max_num_seqs: int
) -> None:
    """Whatever order of common steps and of steps of one alone."""
    engine, _ = build_engine(num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs)
    for number, (prompt_len, max_tokens, n) in enumerate(asked):
        add(engine, f"r{number}", prompt_len, max_tokens=max_tokens, n=n)
    tokens: dict[tuple[str, int], list[int]] = {}

    def take(only: str | None) -> None:
        for one in engine.step(only).outputs:
            assert only in (None, one.request_id)
            if one.token_id is not None:
                tokens.setdefault((one.request_id, one.index), []).append(one.token_id)

    for number in steps:
        take(None if number < 0 else f"r{number}")
    while engine.has_work:
        take(None)

    assert tokens == {
        (f"r{number}", index): list(range(100, 100 + max_tokens))
        for number, (_, max_tokens, n) in enumerate(asked)
        for index in range(n)
    }
    assert run(engine) == {}
