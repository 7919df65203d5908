"""Steps with drafted tokens: what they cost, what they return, and when none are drafted."""

from typing import Any

import pytest

from engine.outputs import SchedulerOutputs, StepOutput
from engine.sequence import FinishReason
from tests.engine.fakes import EOS, ScriptedExecutor, ScriptedRunner, add, build_engine

PERIOD = [5, 6, 7, 8]
SCRIPT = PERIOD * 20
LIMITS: dict[str, Any] = {"max_model_len": 200, "num_kv_blocks": 400, "num_speculative_tokens": 7}


def run(limits: dict[str, Any], scripts: dict[str, list[int]], **params: Any) -> list[StepOutput]:
    engine, _ = build_engine(ScriptedRunner(scripts), **{**LIMITS, **limits})
    for name in scripts:
        add(engine, name, 3, **{"max_tokens": 60, **params})
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert not engine.num_tracked
    assert engine.scheduler.block_manager.num_free_blocks == engine.config.num_kv_blocks
    return steps


def tokens_of(steps: list[StepOutput]) -> dict[str, list[int | None]]:
    tokens: dict[str, list[int | None]] = {}
    for step in steps:
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).append(output.token_id)
    return tokens


def test_a_repeated_text_needs_few_steps() -> None:
    plain = run({"num_speculative_tokens": 0}, {"a": SCRIPT})
    drafted = run({}, {"a": SCRIPT})
    assert tokens_of(drafted) == tokens_of(plain) == {"a": SCRIPT[:60]}
    assert len(plain) == 60
    assert len(drafted) < 20
    reports = [step.report for step in drafted]
    num_accepted = sum(report.num_accepted_tokens for report in reports)
    assert sum(report.num_generated_tokens for report in reports) == 60 == len(drafted) + num_accepted
    assert {report.num_decode_seqs for report in reports[1:]} == {1}
    assert sum(report.num_decode_tokens - 1 for report in reports[1:]) == sum(
        report.num_drafted_tokens for report in reports
    )


def test_a_finish_inside_a_draft_ends_the_output_there() -> None:
    script = [*SCRIPT[:22], EOS, *SCRIPT]
    (end,) = [
        output
        for step in run({"num_speculative_tokens": 15}, {"a": script})
        for output in step.outputs
        if output.finish_reason
    ]
    assert (end.token_id, end.finish_reason) == (EOS, FinishReason.STOP)
    assert len(tokens_of(run({"num_speculative_tokens": 15}, {"a": script}))["a"]) == 23


def test_the_last_token_by_length_is_not_exceeded() -> None:
    for max_tokens in range(1, 40):
        steps = run({"num_speculative_tokens": 15}, {"a": SCRIPT}, max_tokens=max_tokens)
        assert tokens_of(steps) == {"a": SCRIPT[:max_tokens]}
    steps = run({"num_speculative_tokens": 15, "max_model_len": 32}, {"a": SCRIPT}, max_tokens=None)
    assert tokens_of(steps) == {"a": SCRIPT[:29]}


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"allowed_token_ids": (5, 6, 7, 8)},
    ],
)
def test_requests_with_logits_processors_are_not_drafted(params: dict[str, Any]) -> None:
    """What a row may sample depends on the tokens before it, which the host counts one by one."""
    assert len(run({}, {"a": SCRIPT}, **params)) == 60


def test_a_large_batch_is_not_drafted() -> None:
    """Its steps are bound by computation already."""
    scripts = {f"r{one}": SCRIPT for one in range(9)}
    steps = run({"max_num_seqs": 9}, scripts)
    assert not any(step.report.num_drafted_tokens for step in steps)
    few = {f"r{one}": SCRIPT for one in range(4)}
    steps = run({"max_num_seqs": 9}, few)
    assert max(step.report.num_decode_tokens for step in steps) == 16


def test_a_step_that_fails_with_drafts_is_executed_without_them() -> None:
    runner = ScriptedRunner({"a": SCRIPT})

    def fault(outputs: SchedulerOutputs) -> None:
        if outputs.drafts:
            raise MemoryError("too many rows")

    runner.fault = fault
    engine, _ = build_engine(runner, **LIMITS)
    add(engine, "a", 3, max_tokens=60)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert tokens_of(steps) == {"a": SCRIPT[:60]}
    assert sum(step.report.num_execution_faults for step in steps) > 0
    assert not any(step.report.num_accepted_tokens for step in steps)


def test_a_row_with_an_error_fails_only_if_its_draft_was_right() -> None:
    """The drafted text goes on, but the row after the 20th token is not finite."""
    steps = run({"num_speculative_tokens": 15}, {"a": [*SCRIPT[:20], -1]})
    (end,) = [output for step in steps for output in step.outputs if output.finish_reason]
    assert end.finish_reason is FinishReason.ERROR
    assert [token for token in tokens_of(steps)["a"] if token is not None] == SCRIPT[:20]


def test_no_step_is_launched_ahead_of_drafts() -> None:
    executor = ScriptedExecutor(ScriptedRunner({"a": SCRIPT}))
    engine, _ = build_engine(executor.runner, executor=executor, **LIMITS)
    add(engine, "a", 3, max_tokens=60)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert tokens_of(steps) == {"a": SCRIPT[:60]}
