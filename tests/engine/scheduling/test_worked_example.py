"""The worked example of `docs/decisions.md`, round by round: three requests, 256 tokens, four sequences."""

from tests.engine.fakes import add, build_engine


def test_three_requests_flow_through_the_rounds_as_written() -> None:
    engine, _ = build_engine(
        max_model_len=512,
        num_kv_blocks=128,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        chunked_prefill=False,
    )
    add(engine, "A", 100, max_tokens=4)
    add(engine, "B", 200, max_tokens=2)
    add(engine, "C", 50, max_tokens=3)
    rounds = []
    schedule = engine.scheduler.schedule

    def recorded(only):
        outputs = schedule(only)
        rounds.append(
            (
                [one.request_id for one in outputs.prefill_sequences],
                [one.request_id for one in outputs.decode_sequences],
                outputs.num_batched_tokens,
            )
        )
        return outputs

    engine.scheduler.schedule = recorded
    ended = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason:
                ended[output.request_id] = len(rounds)

    assert rounds == [
        (["A"], [], 100),  # B would bring it to 300, and C does not pass B.
        (["B"], ["A"], 201),  # C would fit; the example takes in one prompt a round.
        (["C"], ["A", "B"], 52),
        ([], ["A", "C"], 2),
        ([], ["C"], 1),
    ]
    assert ended == {"B": 3, "A": 4, "C": 5}
