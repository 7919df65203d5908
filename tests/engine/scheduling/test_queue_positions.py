"""Positions of waiting requests: one for each request of which no output runs."""

from engine.outputs import WaitingReason
from tests.engine.fakes import add, build_engine


def test_a_request_counts_once_however_many_outputs_wait() -> None:
    engine, _ = build_engine(max_num_seqs=1)
    add(engine, "a", 4, max_tokens=9)
    add(engine, "b", 5, n=3, max_tokens=3)
    add(engine, "c", 6, max_tokens=3)
    engine.step()

    positions = [
        (one.request_id, one.requests_ahead, one.tokens_ahead, one.reason)
        for one in engine.request_positions()
    ]
    assert positions == [("b", 0, 9, WaitingReason.SEQ_BUDGET), ("c", 1, 17, WaitingReason.BEHIND)]


def test_a_request_of_which_an_output_runs_does_not_wait() -> None:
    """Two of its three outputs wait for the first, which computes the prompt; then they wait for slots."""
    engine, _ = build_engine(max_num_seqs=1, max_num_batched_tokens=4)
    add(engine, "a", 9, n=3, max_tokens=2)
    add(engine, "b", 2, max_tokens=2)
    assert [(one.request_id, one.requests_ahead) for one in engine.request_positions()] == [
        ("a", 0),
        ("b", 1),
    ]

    engine.step()
    assert {one.request_id for one in engine.queue_positions()} == {"a", "b"}
    assert [one.request_id for one in engine.request_positions()] == ["b"]
