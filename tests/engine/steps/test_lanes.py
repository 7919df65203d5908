"""The lanes of a step: what each sequence computed, or why it waited."""

from engine.outputs import Lane
from engine.steps.lanes import MAX_LANES
from tests.engine.fakes import add, build_engine


def test_a_report_has_lanes_only_if_they_are_recorded() -> None:
    engine, _ = build_engine()
    add(engine, "a", 3, max_tokens=4)
    assert engine.step().report.lanes is None

    engine.records_lanes = True
    assert engine.step().report.lanes == (Lane("a", 0, "decode", 1),)


def test_lanes_show_prefill_decode_and_the_reason_of_a_wait() -> None:
    engine, _ = build_engine(max_num_seqs=2)
    engine.records_lanes = True
    add(engine, "a", 4, max_tokens=9)
    engine.step()
    add(engine, "b", 5, max_tokens=3)
    add(engine, "c", 6, max_tokens=3)
    add(engine, "d", 6, max_tokens=3)

    assert engine.step().report.lanes == (
        Lane("a", 0, "decode", 1),
        Lane("b", 0, "prefill", 5),
        Lane("c", 0, "waiting", 0, "seq_budget"),
        Lane("d", 0, "waiting", 0, "behind"),
    )


def test_a_preempted_sequence_is_shown_as_such() -> None:
    engine, _ = build_engine(max_num_seqs=4, num_kv_blocks=6, block_size=2, max_model_len=10)
    engine.records_lanes = True
    add(engine, "a", 3, max_tokens=7)
    add(engine, "b", 3, max_tokens=7)
    lanes: list[Lane] = []
    while engine.has_work:
        lanes += engine.step().report.lanes or ()

    preempted = [lane for lane in lanes if lane.state == "preempted"]
    assert preempted
    assert {lane.request_id for lane in preempted} == {"b"}
    assert all(lane.reason == "kv_blocks" for lane in preempted)


def test_lanes_of_a_long_queue_are_bounded() -> None:
    engine, _ = build_engine(max_num_seqs=1)
    engine.records_lanes = True
    for number in range(MAX_LANES + 50):
        add(engine, f"r{number:04}", 3, max_tokens=4)

    report = engine.step().report
    assert report.lanes is not None
    assert len(report.lanes) <= MAX_LANES + 1
    assert sum(number for _, number in report.waiting_reasons) == MAX_LANES + 49
