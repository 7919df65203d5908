"""Measures each step and counts the events of its requests, for metrics and the trace."""

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager

from engine.outputs import FinishedRequest, Lane, SchedulerOutputs, StepReport, Waited
from engine.requests.request_state import OutputState, RequestState
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, worst_reason


class StepRecorder:
    """Records one step at a time, between `start_step` and `build_report`.

    A request with several outputs counts once when it is first scheduled, at its first token and when its
    last output finishes. Tokens are counted one by one. `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = 0
        self._reset()

    def start_step(self) -> None:
        self._step += 1
        self._reset()

    def _reset(self) -> None:
        self._started = self._clock()
        self._stage_seconds: dict[str, float] = {}
        self._num_faults = 0
        self._num_drafted_tokens = self._num_accepted_tokens = 0
        self._num_generated_tokens = 0
        self._queue_seconds: list[Waited] = []
        self._first_token_seconds: list[Waited] = []
        self._inter_token_seconds: list[float] = []
        self._finished: list[FinishedRequest] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a stage of the step."""
        started = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - started
            self._stage_seconds[name] = self._stage_seconds.get(name, 0.0) + elapsed

    def record_fault(self) -> None:
        """Count an execution that failed. It may be retried in parts."""
        self._num_faults += 1

    def record_drafts(
        self, drafts: Mapping[Sequence, tuple[int, ...]], accepted: Mapping[Sequence, Sized]
    ) -> None:
        self._num_drafted_tokens += sum(map(len, drafts.values()))
        self._num_accepted_tokens += sum(map(len, accepted.values()))

    def record_scheduled(self, request: RequestState, scheduled_at: float) -> None:
        """`scheduled_at`: time of the decision that first scheduled the request."""
        request.scheduled_at = scheduled_at
        if not request.is_resumed:
            self._queue_seconds.append(Waited(request.priority, scheduled_at - request.queued_at))

    def record_token(self, output: OutputState, now: float) -> None:
        self._num_generated_tokens += 1
        request = output.request
        if output.last_token_at is not None:
            self._inter_token_seconds.append(now - output.last_token_at)
        elif request.first_token_at is None and not request.is_resumed:
            request.first_token_at = now
            self._first_token_seconds.append(Waited(request.priority, now - request.queued_at))
        output.last_token_at = now

    def record_finished(self, request: RequestState, now: float) -> None:
        outputs, queued_at, first_token_at = request.outputs, request.queued_at, request.first_token_at
        self._finished.append(
            FinishedRequest(
                reason=_worst_finish_reason(request).value,
                num_prompt_tokens=outputs[0].sequence.num_prompt_tokens,
                num_output_tokens=sum(output.sequence.num_output_tokens for output in outputs)
                + sum(len(output.token_ids) for output in request.resumed_as_finished),
                num_preemptions=sum(output.sequence.num_preemptions for output in outputs),
                seconds=now - queued_at,
                first_token_seconds=None if first_token_at is None else first_token_at - queued_at,
            )
        )

    def build_report(
        self, scheduled: SchedulerOutputs, scheduler: Scheduler, lanes: tuple[Lane, ...] | None = None
    ) -> StepReport:
        config, seconds, now = scheduler.config, self._stage_seconds, self._clock()
        return StepReport(
            step=self._step,
            schedule_seconds=seconds.get("schedule", 0.0),
            execute_seconds=seconds.get("execute", 0.0),
            sample_seconds=seconds.get("sample", 0.0),
            detokenize_seconds=seconds.get("detokenize", 0.0),
            update_seconds=seconds.get("update", 0.0),
            total_seconds=now - self._started,
            seconds_since_decision=now - scheduled.decided_at,
            num_prefill_tokens=sum(item.num_new_tokens for item in scheduled.prefill),
            num_decode_tokens=len(scheduled.decode),
            num_prefill_seqs=len(scheduled.prefill),
            num_decode_seqs=len(scheduled.decode) - sum(map(len, scheduled.drafts.values())),
            num_drafted_tokens=self._num_drafted_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_prefill_seqs=config.prefill_seqs_limit,
            bound_by=scheduled.bound_by.value if scheduled.bound_by else None,
            num_running=len(scheduler.running_queue),
            num_waiting=scheduler.num_waiting,
            waiting_reasons=tuple(
                (reason.value, number) for reason, number in scheduler.waiting_reasons().items()
            ),
            num_preempted=len(scheduled.preempted),
            num_recomputed_tokens=_num_recomputed_tokens(scheduled),
            num_kv_blocks=config.num_kv_blocks,
            num_free_kv_blocks=scheduler.block_manager.num_free_blocks,
            num_cached_kv_blocks=scheduler.block_manager.num_cached_blocks,
            num_prefix_queried_tokens=scheduled.num_prefix_queried_tokens,
            num_prefix_hit_tokens=scheduled.num_prefix_hit_tokens,
            num_generated_tokens=self._num_generated_tokens,
            queue_seconds=tuple(self._queue_seconds),
            first_token_seconds=tuple(self._first_token_seconds),
            inter_token_seconds=tuple(self._inter_token_seconds),
            finished=tuple(self._finished),
            num_execution_faults=self._num_faults,
            lanes=lanes,
        )


def _worst_finish_reason(request: RequestState) -> FinishReason:
    reasons = [output.sequence.finish_reason for output in request.outputs]
    reasons += [output.finish_reason for output in request.resumed_as_finished]
    return worst_reason(reason for reason in reasons if reason is not None)


def _num_recomputed_tokens(scheduled: SchedulerOutputs) -> int:
    """Tokens of this step that had been computed before a preemption."""
    return sum(
        max(0, min(item.start + item.num_new_tokens, item.sequence.num_lost_tokens) - item.start)
        for item in scheduled.prefill
    )
