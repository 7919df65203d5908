"""The worked example of `docs/decisions.md`: three requests, 256 tokens per step, four sequences."""

from tests.engine.fakes import add, build_engine


def test_each_step_schedules_what_the_example_says() -> None:
    engine, runner = build_engine(
        max_model_len=512,
        num_kv_blocks=128,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        chunked_prefill=False,
    )
    add(engine, "A", 100, max_tokens=4)
    add(engine, "B", 200, max_tokens=2)
    add(engine, "C", 50, max_tokens=3)
    finished_at = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason:
                finished_at[output.request_id] = len(runner.steps)

    # Of each step: request, start, number of tokens.
    assert runner.steps == [
        [("A", 0, 100)],  # B would make it 300, and C does not go before B.
        [("A", 100, 1), ("B", 0, 200)],  # C would fit; the example admits one prompt per step.
        [("A", 101, 1), ("B", 200, 1), ("C", 0, 50)],
        [("A", 102, 1), ("C", 50, 1)],
        [("C", 51, 1)],
    ]
    assert finished_at == {"B": 3, "A": 4, "C": 5}
