"""Metrics from step reports: every value counts once, in a series that existed before its first event."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.engine import Engine
from engine.outputs import FinishedRequest, StepReport, Waited, WaitingReason
from engine.sequence import FinishReason
from monitoring.engine import EngineMetrics
from tests.engine.fakes import Clock, add, build_engine

MAX_MODEL_LEN = 2048
MAX_STEPS = 1000
REPORT = StepReport(
    step=1,
    schedule_seconds=0.001,
    execute_seconds=0.02,
    sample_seconds=0.002,
    detokenize_seconds=0.0005,
    update_seconds=0.0004,
    total_seconds=0.0239,
    num_prefill_tokens=96,
    num_decode_tokens=4,
    num_prefill_seqs=2,
    num_decode_seqs=4,
    max_num_batched_tokens=200,
    max_num_seqs=8,
    max_num_prefill_seqs=4,
    bound_by="kv_blocks",
    num_running=6,
    num_waiting=3,
    waiting_reasons=(("kv_blocks", 1), ("behind", 2)),
    num_preempted=1,
    num_recomputed_tokens=32,
    num_drafted_tokens=40,
    num_accepted_tokens=33,
    num_kv_blocks=40,
    num_free_kv_blocks=10,
    num_generated_tokens=6,
    queue_seconds=(Waited(2, 0.2), Waited(2, 0.3), Waited(4, 60.0)),
    first_token_seconds=(Waited(2, 0.4), Waited(2, 0.6), Waited(4, 90.0)),
    inter_token_seconds=(0.02, 0.02, 0.02, 0.02),
    finished=(
        FinishedRequest(
            reason="length",
            num_prompt_tokens=50,
            num_output_tokens=5,
            num_preemptions=0,
            seconds=0.9,
            first_token_seconds=0.5,
        ),
    ),
    num_execution_faults=1,
)


class MetricsHarness:
    """Engine metrics in a separate registry."""

    def __init__(self, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry, model="tiny", max_model_len=max_model_len)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tokenmill_{name}", {"model": "tiny", **labels})

    def step_until_idle(self, engine: Engine) -> None:
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                return
            self.metrics.observe(engine.step().report)
        raise AssertionError(f"the engine has work after {MAX_STEPS} steps")

    def num_series(self) -> int:
        return sum(len(metric.samples) for metric in self.registry.collect())


@pytest.fixture
def watched() -> MetricsHarness:
    return MetricsHarness()


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("requests", {"state": "running"}, 6),
        ("requests", {"state": "waiting"}, 3),
        ("requests_waiting_by_reason", {"reason": "behind"}, 2),
        ("requests_waiting_by_reason", {"reason": "kv_blocks"}, 1),
        ("requests_waiting_by_reason", {"reason": "token_budget"}, 0),
        ("step_budget", {"kind": "tokens"}, 200),
        ("step_budget", {"kind": "sequences"}, 8),
        ("step_budget", {"kind": "prefill_sequences"}, 4),
        ("step_budget_used_ratio_sum", {"kind": "tokens"}, 0.5),
        ("step_budget_used_ratio_sum", {"kind": "sequences"}, 0.75),
        ("step_budget_used_ratio_sum", {"kind": "prefill_sequences"}, 0.5),
        ("step_bound_by_total", {"reason": "kv_blocks"}, 1),
        ("step_bound_by_total", {"reason": "seq_budget"}, 0),
        ("step_tokens_sum", {"kind": "prefill"}, 96),
        ("step_tokens_sum", {"kind": "decode"}, 4),
        ("step_sequences_sum", {"kind": "prefill"}, 2),
        ("step_sequences_sum", {"kind": "decode"}, 4),
        ("step_duration_seconds_sum", {"stage": "execute"}, 0.02),
        ("step_duration_seconds_sum", {"stage": "total"}, 0.0239),
        ("preemptions_total", {}, 1),
        ("recomputed_tokens_total", {}, 32),
        ("draft_tokens_total", {}, 40),
        ("accepted_draft_tokens_total", {}, 33),
        ("execution_faults_total", {}, 1),
        ("kv_blocks", {"state": "used"}, 30),
        ("kv_blocks", {"state": "free"}, 10),
        ("kv_cache_usage_ratio", {}, 0.75),
        ("queue_wait_seconds_sum", {"priority": "2"}, 0.5),
        ("queue_wait_seconds_sum", {"priority": "4"}, 60.0),
        ("time_to_first_token_seconds_sum", {"priority": "2"}, 1.0),
        ("time_to_first_token_seconds_sum", {"priority": "4"}, 90.0),
        ("time_to_first_token_seconds_sum", {"priority": "0"}, 0.0),
        ("inter_token_latency_seconds_count", {}, 4),
        ("requests_finished_total", {"reason": "length"}, 1),
        ("generation_tokens_total", {}, 6),
        ("prompt_tokens_total", {}, 50),
        ("request_prompt_tokens_sum", {}, 50),
        ("request_generation_tokens_sum", {}, 5),
        ("e2e_request_latency_seconds_sum", {}, 0.9),
        ("request_time_per_output_token_seconds_sum", {}, 0.1),
    ],
)
def test_each_value_of_a_report_has_its_metric(
    watched: MetricsHarness, name: str, labels: dict[str, str], value: float
) -> None:
    before = watched(name, **labels)
    watched.metrics.observe(REPORT)
    assert before == 0, "the series exists before its first event"
    assert watched(name, **labels) == pytest.approx(value)


def test_no_report_creates_a_series(watched: MetricsHarness) -> None:
    before = watched.num_series()
    ended = [
        replace(REPORT.finished[0], reason=reason.value, first_token_seconds=None) for reason in FinishReason
    ]
    for reason in WaitingReason:
        watched.metrics.observe(replace(REPORT, bound_by=reason.value, finished=tuple(ended)))
    assert watched.num_series() == before


def test_an_unknown_reason_is_an_error_and_creates_no_series(watched: MetricsHarness) -> None:
    before = watched.num_series()
    with pytest.raises(KeyError):
        watched.metrics.observe(replace(REPORT, bound_by="unknown"))
    assert watched.num_series() == before


def test_requests_of_one_token_have_no_time_between_tokens(watched: MetricsHarness) -> None:
    one = replace(REPORT.finished[0], num_output_tokens=1)
    none = replace(REPORT.finished[0], num_output_tokens=0, first_token_seconds=None)
    watched.metrics.observe(replace(REPORT, finished=(one, none)))
    assert watched("request_time_per_output_token_seconds_count") == 0
    assert watched("request_generation_tokens_count") == 2


def test_gauges_are_zero_after_all_requests_are_aborted(watched: MetricsHarness) -> None:
    """vllm#22545, vllm#29928: gauges kept their last values after all requests were aborted."""
    engine, _ = build_engine(max_num_seqs=4)
    for number in range(6):
        add(engine, f"r{number}", 8, max_tokens=20)
    watched.metrics.observe(engine.step().report)
    watched.metrics.observe(engine.step().report)
    assert watched("requests", state="running") == 4
    assert watched("requests", state="waiting") == 2
    assert watched("kv_blocks", state="used")
    for number in range(6):
        assert engine.cancel(f"r{number}")
    watched.step_until_idle(engine)
    for name, labels in (
        ("requests", {"state": "running"}),
        ("requests", {"state": "waiting"}),
        ("requests_waiting_by_reason", {"reason": "seq_budget"}),
        ("requests_waiting_by_reason", {"reason": "behind"}),
        ("kv_blocks", {"state": "used"}),
        ("kv_cache_usage_ratio", {}),
    ):
        assert watched(name, **labels) == 0, name


def test_finished_requests_and_their_tokens_add_up(watched: MetricsHarness) -> None:
    """vllm#31503, vllm#55634: aborted requests were missing in the finished counter but not in the tokens."""
    engine, runner = build_engine(num_kv_blocks=64)

    def poison(sequence: Any) -> None:
        if sequence.request_id == "broken" and sequence.num_output_tokens == 2:
            raise RuntimeError("a fault")

    runner.sample_fault = poison
    submitted = [f"done{number}" for number in range(3)] + [f"gone{number}" for number in range(5)]
    for request_id in [*submitted, "broken"]:
        add(engine, request_id, 6, max_tokens=6)
    for _ in range(3):
        watched.metrics.observe(engine.step().report)
    for number in range(5):
        assert engine.cancel(f"gone{number}")
    watched.step_until_idle(engine)
    counts = {
        reason.value: watched("requests_finished_total", reason=reason.value) for reason in FinishReason
    }
    assert counts == {"stop": 0, "length": 3, "cancelled": 5, "timeout": 0, "error": 1}
    assert watched("request_prompt_tokens_count") == 9
    assert watched("request_prompt_tokens_sum") == watched("prompt_tokens_total") == 9 * 6
    assert watched("request_generation_tokens_sum") == watched("generation_tokens_total")
    assert watched("e2e_request_latency_seconds_count") == 9


def test_the_first_token_is_counted_once_for_each_request_that_had_one() -> None:
    """vllm#15167, vllm#6337: time to first token counted once a chunk, or all zero."""
    clock = Clock()
    watched = MetricsHarness(48)
    engine, _ = build_engine(
        clock=clock, max_num_batched_tokens=8, num_kv_blocks=10, max_num_seqs=3, max_num_prefill_seqs=2
    )
    add(engine, "chunked", 20, max_tokens=12)  # three chunks of at most 8 tokens
    add(engine, "single", 4, max_tokens=1)
    add(engine, "gone", 4, max_tokens=5)
    add(engine, "longer", 4, max_tokens=20)  # together with the first it needs more than ten blocks
    assert engine.cancel("gone")
    num_preempted = 0
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        clock.now += 0.05
        report = engine.step().report
        num_preempted += report.num_preempted
        watched.metrics.observe(report)
    assert not engine.has_work
    assert num_preempted, "the pool is too small"
    assert watched("time_to_first_token_seconds_count", priority="2") == 3
    # The chunked request alone takes three steps of 0.05 s.
    assert (watched("time_to_first_token_seconds_sum", priority="2") or 0) >= 3 * 0.05
    assert watched("queue_wait_seconds_count", priority="2") == 3
    generated = watched("generation_tokens_total")
    assert generated == 12 + 1 + 20
    assert watched("inter_token_latency_seconds_count") == generated - 3


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("time_to_first_token_seconds", {"priority": "2"}),
        ("inter_token_latency_seconds", {}),
        ("queue_wait_seconds", {"priority": "2"}),
        ("e2e_request_latency_seconds", {}),
    ],
)
def test_the_buckets_cover_a_wait_of_five_minutes(
    watched: MetricsHarness, name: str, labels: dict[str, str]
) -> None:
    """vllm#15106, vllm#8115: the buckets ended too low, and slow requests all fell into +Inf."""
    watched.metrics.observe(
        StepReport(
            step=1,
            queue_seconds=(Waited(2, 300.0),),
            first_token_seconds=(Waited(2, 300.0),),
            inter_token_seconds=(300.0,),
            finished=(replace(REPORT.finished[0], seconds=300.0),),
        )
    )
    assert watched(f"{name}_bucket", le="2560.0", **labels) == 1
    assert watched(f"{name}_bucket", le="160.0", **labels) == 0
    assert watched(f"{name}_bucket", le="0.0005", **labels) == 0


@pytest.mark.parametrize("max_model_len", [2, 7, 1000, 2048, 131072])
def test_the_length_buckets_end_at_the_models_length(max_model_len: int) -> None:
    """vllm#8115: token histograms ended below the actual lengths."""
    watched = MetricsHarness(max_model_len)
    longest = replace(
        REPORT.finished[0], num_prompt_tokens=max_model_len - 1, num_output_tokens=max_model_len
    )
    watched.metrics.observe(replace(REPORT, finished=(longest,)))
    last = f"{float(max_model_len)}"
    assert watched("request_generation_tokens_bucket", le=last) == 1
    assert watched("request_prompt_tokens_bucket", le=last) == 1
    assert watched("request_generation_tokens_bucket", le="1.0") == 0
