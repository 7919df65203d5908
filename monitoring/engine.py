"""Metrics of the engine, updated from the report of each step.

Everything comes from `StepReport`. Label values are the engine's enumerations, known in advance. One thread
observes.
"""

from prometheus_client import CollectorRegistry

from engine.outputs import FinishedRequest, StepReport, WaitingReason
from engine.sequence import FinishReason
from monitoring.families import POWER_BUCKETS, RATIO_BUCKETS, Families, length_buckets

REASONS = tuple(reason.value for reason in WaitingReason)
STAGES = ("schedule", "execute", "sample", "detokenize", "update", "total")
KINDS = ("prefill", "decode")
PRIORITIES = ("0", "1", "2", "3", "4")
"""Priority classes; 0 is served first."""
BLOCK_STATES = ("used", "cached", "free")
"""`cached`: free to be allocated, but still usable for a prefix cache hit."""


class EngineMetrics:
    """The engine's metrics in `docs/metrics.md`, for one model in one registry.

    `max_model_len`: the longest sequence in tokens, the last bucket of the length histograms.
    """

    def __init__(self, registry: CollectorRegistry, *, model: str, max_model_len: int) -> None:
        families = Families(registry, model=model)
        self._parts = (
            _Requests(families),
            _Budgets(families),
            _Steps(families),
            _Blocks(families),
            _Latencies(families),
            _Outcomes(families, max_model_len),
        )

    def observe(self, report: StepReport) -> None:
        """Count one step. The report of an idle engine resets the gauges to zero."""
        for part in self._parts:
            part.observe(report)


class _Requests:
    """Running requests, waiting requests, and the reasons why they wait."""

    def __init__(self, families: Families) -> None:
        self._states = families.gauges(
            "requests",
            "Requests in the engine. A running request holds a slot and KV blocks, a waiting one does not.",
            "state",
            ("running", "waiting"),
        )
        self._reasons = families.gauges(
            "requests_waiting_by_reason",
            "Waiting requests in the engine, by what kept them out of the last step.",
            "reason",
            REASONS,
        )

    def observe(self, report: StepReport) -> None:
        self._states["running"].set(report.num_running)
        self._states["waiting"].set(report.num_waiting)
        reasons = dict(report.waiting_reasons)
        for reason, gauge in self._reasons.items():
            gauge.set(reasons.get(reason, 0))


class _Budgets:
    """The limits of a step, how much of each it used, and which one bound it."""

    def __init__(self, families: Families) -> None:
        self._limits = families.gauges(
            "step_budget",
            "Limits of one step: tokens, sequences, and sequences in prefill.",
            "kind",
            ("tokens", "sequences", "prefill_sequences"),
        )
        self._shares = families.histograms(
            "step_budget_used_ratio",
            "Share of each limit that a step used.",
            "kind",
            self._limits,
            RATIO_BUCKETS,
        )
        self._bound_by = families.counters(
            "step_bound_by_total",
            "Steps that left work waiting, by the limit that kept it out.",
            "reason",
            REASONS,
        )

    def observe(self, report: StepReport) -> None:
        num_tokens = report.num_prefill_tokens + report.num_decode_tokens
        num_seqs = report.num_prefill_seqs + report.num_decode_seqs
        self._spend("tokens", num_tokens, report.max_num_batched_tokens)
        self._spend("sequences", num_seqs, report.max_num_seqs)
        self._spend("prefill_sequences", report.num_prefill_seqs, report.max_num_prefill_seqs)
        if report.bound_by is not None:
            self._bound_by[report.bound_by].inc()

    def _spend(self, kind: str, used: int, limit: int) -> None:
        self._limits[kind].set(limit)
        self._shares[kind].observe(used / limit if limit else 0)


class _Steps:
    """What a step computed, and how long each stage took."""

    def __init__(self, families: Families) -> None:
        self._tokens = families.histograms(
            "step_tokens", "Tokens computed in one step.", "kind", KINDS, POWER_BUCKETS
        )
        self._sequences = families.histograms(
            "step_sequences", "Sequences in one step.", "kind", KINDS, POWER_BUCKETS
        )
        self._seconds = families.histograms(
            "step_duration_seconds", "Duration of one step, by stage and in total.", "stage", STAGES
        )
        self._preemptions = families.counter(
            "preemptions_total", "Running requests that lost their KV blocks to others."
        )
        self._recomputed = families.counter(
            "recomputed_tokens_total", "Tokens computed again after a preemption."
        )
        self._drafted = families.counter(
            "draft_tokens_total", "Tokens drafted by speculative decoding and verified by a step."
        )
        self._accepted = families.counter(
            "accepted_draft_tokens_total", "Drafted tokens that were the sampled ones."
        )
        self._faults = families.counter(
            "execution_faults_total", "Exceptions in the forward pass, including those that a retry overcame."
        )

    def observe(self, report: StepReport) -> None:
        self._tokens["prefill"].observe(report.num_prefill_tokens)
        self._tokens["decode"].observe(report.num_decode_tokens)
        self._sequences["prefill"].observe(report.num_prefill_seqs)
        self._sequences["decode"].observe(report.num_decode_seqs)
        for stage, histogram in self._seconds.items():
            histogram.observe(getattr(report, f"{stage}_seconds"))
        self._preemptions.inc(report.num_preempted)
        self._recomputed.inc(report.num_recomputed_tokens)
        self._drafted.inc(report.num_drafted_tokens)
        self._accepted.inc(report.num_accepted_tokens)
        self._faults.inc(report.num_execution_faults)


class _Blocks:
    """The KV pool."""

    def __init__(self, families: Families) -> None:
        self._blocks = families.gauges("kv_blocks", "KV blocks by state.", "state", BLOCK_STATES)
        self._usage = families.gauge("kv_cache_usage_ratio", "Share of the KV blocks in use.")
        self._queried = families.counter(
            "prefix_cache_queried_tokens_total", "Tokens of requests at the time they got a slot."
        )
        self._hit = families.counter(
            "prefix_cache_hit_tokens_total", "Of the queried tokens, those found in the prefix cache."
        )

    def observe(self, report: StepReport) -> None:
        used = report.num_kv_blocks - report.num_free_kv_blocks
        self._blocks["used"].set(used)
        self._blocks["cached"].set(report.num_cached_kv_blocks)
        self._blocks["free"].set(report.num_free_kv_blocks - report.num_cached_kv_blocks)
        self._usage.set(used / report.num_kv_blocks if report.num_kv_blocks else 0)
        self._queried.inc(report.num_prefix_queried_tokens)
        self._hit.inc(report.num_prefix_hit_tokens)


class _Latencies:
    """Latencies that clients see. Each event counts once."""

    def __init__(self, families: Families) -> None:
        self._queue = families.histograms(
            "queue_wait_seconds",
            "Time from acceptance to the first step of the request, by priority class.",
            "priority",
            PRIORITIES,
        )
        self._first_token = families.histograms(
            "time_to_first_token_seconds",
            "Time from acceptance to the first token, by priority class.",
            "priority",
            PRIORITIES,
        )
        self._inter_token = families.histogram(
            "inter_token_latency_seconds", "Time between two tokens of one request."
        )

    def observe(self, report: StepReport) -> None:
        for histograms, waits in (
            (self._queue, report.queue_seconds),
            (self._first_token, report.first_token_seconds),
        ):
            for priority, seconds in waits:
                histograms[str(priority)].observe(seconds)
        for seconds in report.inter_token_seconds:
            self._inter_token.observe(seconds)


class _Outcomes:
    """How requests ended, and their lengths and times."""

    def __init__(self, families: Families, max_model_len: int) -> None:
        lengths = length_buckets(max_model_len)
        self._finished = families.counters(
            "requests_finished_total",
            "Requests that ended in the engine, by finish reason.",
            "reason",
            [reason.value for reason in FinishReason],
        )
        self._generation_tokens = families.counter("generation_tokens_total", "Tokens generated.")
        self._prompt_tokens = families.counter(
            "prompt_tokens_total", "Prompt tokens of the requests that ended."
        )
        self._prompt_lengths = families.histogram(
            "request_prompt_tokens", "Prompt tokens of one request.", lengths
        )
        self._output_lengths = families.histogram(
            "request_generation_tokens", "Output tokens of one request.", lengths
        )
        self._e2e = families.histogram("e2e_request_latency_seconds", "Time from acceptance to the end.")
        self._per_token = families.histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of one request that has two or more.",
        )

    def observe(self, report: StepReport) -> None:
        self._generation_tokens.inc(report.num_generated_tokens)
        for finished in report.finished:
            self._end(finished)

    def _end(self, finished: FinishedRequest) -> None:
        self._finished[finished.reason].inc()
        self._prompt_tokens.inc(finished.num_prompt_tokens)
        self._prompt_lengths.observe(finished.num_prompt_tokens)
        self._output_lengths.observe(finished.num_output_tokens)
        self._e2e.observe(finished.seconds)
        if finished.first_token_seconds is not None and finished.num_output_tokens > 1:
            generating = finished.seconds - finished.first_token_seconds
            self._per_token.observe(generating / (finished.num_output_tokens - 1))
