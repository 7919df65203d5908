"""What is told of a step and of its requests: times and counts, as plain numbers. Decides nothing."""

from engine.outputs import FinishedSequence, SchedulerOutputs, StepReport, Waited
from engine.requests.request_state import Request, RequestTimes
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason
from engine.steps.step_timer import StepTimer

_WORST_FIRST = (
    FinishReason.ERROR,
    FinishReason.TIMEOUT,
    FinishReason.CANCELLED,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


class StepLog:
    """Gathers the events of one step, and closes with its report.

    A request counts once, however many outputs it has: when it starts, at its first token, and at the end of
    its last output. Tokens count one by one.
    """

    def __init__(self, step: int, timer: StepTimer) -> None:
        self._step = step
        self._timer = timer
        self._queue_seconds: list[Waited] = []
        self._first_token_seconds: list[Waited] = []
        self._inter_token_seconds: list[float] = []
        self._finished: list[FinishedSequence] = []
        self._num_generated_tokens = 0

    def started(self, times: RequestTimes, scheduled_at: float) -> None:
        """`scheduled_at`: when the step that first scheduled the request was decided."""
        times.started = scheduled_at
        if not times.resumed:
            self._queue_seconds.append(Waited(times.priority, scheduled_at - times.queued_at))

    def token(self, times: RequestTimes, last_token: float | None, now: float) -> None:
        """`last_token`: when this engine drew the token before it in the same output."""
        self._num_generated_tokens += 1
        if last_token is not None:
            self._inter_token_seconds.append(now - last_token)
        elif times.first_token is None and not times.resumed:
            times.first_token = now
            self._first_token_seconds.append(Waited(times.priority, now - times.queued_at))

    def finished(self, request: Request, now: float) -> None:
        times, outputs = request.times, request.outputs
        first_token = times.first_token
        self._finished.append(
            FinishedSequence(
                reason=_reason_of(request).value,
                num_prompt_tokens=outputs[0].sequence.num_prompt_tokens,
                num_output_tokens=sum(one.sequence.num_output_tokens for one in outputs)
                + sum(len(one.token_ids) for one in request.ended_before),
                num_preemptions=sum(one.sequence.num_preemptions for one in outputs),
                seconds=now - times.queued_at,
                first_token_seconds=None if first_token is None else first_token - times.queued_at,
            )
        )

    def close(self, outputs: SchedulerOutputs, scheduler: Scheduler) -> StepReport:
        config, seconds = scheduler.config, self._timer.seconds
        return StepReport(
            step=self._step,
            schedule_seconds=seconds.get("schedule", 0.0),
            execute_seconds=seconds.get("execute", 0.0),
            sample_seconds=seconds.get("sample", 0.0),
            detokenize_seconds=seconds.get("detokenize", 0.0),
            update_seconds=seconds.get("update", 0.0),
            total_seconds=self._timer.total(),
            seconds_since_decision=self._timer.since(outputs.decided_at),
            num_prefill_tokens=sum(item.num_new_tokens for item in outputs.prefill),
            num_decode_tokens=len(outputs.decode),
            num_prefill_seqs=len(outputs.prefill),
            num_decode_seqs=len(outputs.decode),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_prefill_seqs=config.prefill_seqs_limit,
            bound_by=outputs.bound_by.value if outputs.bound_by else None,
            num_running=len(scheduler.running_queue),
            num_waiting=scheduler.num_waiting,
            waiting_reasons=tuple(
                (reason.value, number) for reason, number in scheduler.waiting_reasons().items()
            ),
            num_preempted=len(outputs.preempted),
            num_recomputed_tokens=_num_recomputed_tokens(outputs),
            num_kv_blocks=config.num_kv_blocks,
            num_free_kv_blocks=scheduler.block_manager.num_free_blocks,
            num_cached_kv_blocks=scheduler.block_manager.num_cached_blocks,
            num_prefix_queried_tokens=outputs.num_prefix_queried_tokens,
            num_prefix_hit_tokens=outputs.num_prefix_hit_tokens,
            num_generated_tokens=self._num_generated_tokens,
            queue_seconds=tuple(self._queue_seconds),
            first_token_seconds=tuple(self._first_token_seconds),
            inter_token_seconds=tuple(self._inter_token_seconds),
            finished=tuple(self._finished),
            num_execution_faults=self._timer.num_faults,
        )


def _reason_of(request: Request) -> FinishReason:
    """The worst end of its outputs."""
    reasons = {one.sequence.finish_reason for one in request.outputs}
    reasons |= {one.finish_reason for one in request.ended_before}
    return next(reason for reason in _WORST_FIRST if reason in reasons)


def _num_recomputed_tokens(outputs: SchedulerOutputs) -> int:
    """Tokens of this step that had been computed before a preemption."""
    return sum(
        max(0, min(item.start + item.num_new_tokens, item.sequence.num_lost_tokens) - item.start)
        for item in outputs.prefill
    )
