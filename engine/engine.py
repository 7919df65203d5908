"""The engine: add and cancel requests, and run steps that generate their tokens.

A fault of one request fails that request only; only `EngineDead` ends the engine. One thread uses an engine.
"""

import time
from collections.abc import Callable
from itertools import chain

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.outputs import SampledToken, SchedulerOutputs, SequenceOutput, StepOutput
from engine.requests.deadlines import DeadlineHeap
from engine.requests.engine_request import EngineRequest
from engine.requests.grammar_gate import GrammarCompiler, GrammarGate
from engine.requests.input_processor import InputProcessor
from engine.requests.parallel_outputs import ParallelOutputs
from engine.requests.request_factory import RequestFactory
from engine.requests.request_state import OutputState, RequestState, describe
from engine.requests.stop_rules import StopRules
from engine.scheduling.queue_positions import (
    QueuePosition,
    RequestPosition,
    queue_positions,
    request_positions,
)
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from engine.steps.fault_isolation import ExecutedStep, Runner, Sampler, StepExecutor
from engine.steps.lanes import step_lanes
from engine.steps.pipeline import AsyncExecutor, Pipeline
from engine.steps.step_report import StepRecorder
from engine.text.detokenizer import Tokenizer

__all__ = ["Engine", "QueuePosition", "RequestPosition"]


class Engine:
    """Continuous batching of one model on one device.

    `runner` and `sampler` run the model: see `engine/steps/fault_isolation.py`. `grammar_compiler`: see
    `engine/requests/grammar_gate.py`; None: requests with structured outputs are refused. `async_executor`:
    see `engine/steps/pipeline.py`; None: each step finishes before the next one is scheduled. `clock` returns
    monotonic seconds.
    """

    # One parameter for each part that runs the model.
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        sampler: Sampler,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        grammar_compiler: GrammarCompiler | None = None,
        async_executor: AsyncExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        #: Whether reports list the sequences of each step.
        self.records_lanes = False
        self.scheduler = Scheduler(config, clock=clock)
        self._clock = clock
        self._rules = StopRules(config)
        self._recorder = StepRecorder(clock)
        executor = StepExecutor(runner, sampler, self._recorder)
        self._pipeline = Pipeline(self.scheduler, executor, self._rules, async_executor, self._recorder)
        input_processor = InputProcessor(tokenizer, eos_token_ids, vocab_size)
        self._request_factory = RequestFactory(config, tokenizer, input_processor, self._rules, clock)
        self._grammars = GrammarGate(grammar_compiler, self._rules)
        self._parallel_outputs = ParallelOutputs(self.scheduler)
        self._deadlines = DeadlineHeap[RequestState]()
        self._requests: dict[str, RequestState] = {}
        #: Outputs whose finish has not been reported.
        self._outputs: dict[Sequence, OutputState] = {}

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished, or `step` has not reported its finish yet."""
        return self.scheduler.has_unfinished_sequences() or bool(self.scheduler.finished_sequences)

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a slot; a request has up to n."""
        return len(self.scheduler.running_queue)

    @property
    def num_waiting(self) -> int:
        """Number of unfinished sequences without a slot, queued or deferred."""
        return self.scheduler.num_waiting

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._grammars)

    @property
    def num_tracked(self) -> int:
        """Number of state entries of requests and outputs. Not 0 in an engine without work: a leak."""
        return (
            len(self._requests)
            + len(self._outputs)
            + len(self._grammars)
            + self._parallel_outputs.num_leaders
        )

    def has_request(self, request_id: str) -> bool:
        """Whether the request is unfinished, or its finish has not been reported yet."""
        return request_id in self._requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InvalidParameter` and changes nothing if it cannot be served."""
        if request.request_id in self._requests:
            raise InvalidParameter("id", f"{request.request_id} is already being served")
        self._grammars.check(request.params.structured_outputs)
        state = self._request_factory.make(request)
        self._parallel_outputs.add(state)
        self._requests[request.request_id] = state
        self._outputs.update((output.sequence, output) for output in state.outputs)
        self._deadlines.add(state, state.queued_at, request.deadlines)
        if state.needs_grammar:
            self._submit_grammar(state)

    def cancel(self, request_id: str) -> bool:
        """Finish all outputs of a request as cancelled; the next step reports them.

        Returns False if the request is unknown or finished.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return False
        self._finish(request, FinishReason.CANCELLED)
        return True

    def discard(self, request_id: str) -> bool:
        """Remove a request without reporting anything. Returns False if it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._grammars.cancel(request)
        for output in request.outputs:
            self._outputs.pop(output.sequence, None)
            self.scheduler.abort(output.sequence, FinishReason.CANCELLED)
        self._parallel_outputs.enqueue_followers(output.sequence for output in request.outputs)
        finished = self.scheduler.pop_finished()
        self.scheduler.finished_sequences += [sequence for sequence in finished if sequence in self._outputs]
        return True

    def step(self, isolate_request_id: str | None = None) -> StepOutput:
        """Run one step and return its new tokens and finish reasons.

        With an `async_executor`, the next step is in flight when it returns. `isolate_request_id`: schedule
        this request only. The others keep their slots and blocks unless it needs them. Tokens of a step in
        flight, and finishes, are reported for all requests. Raises `EngineDead` if no step can be executed.
        """
        self._recorder.start_step()
        self._expire_deadlines()
        isolated = self._sequences_of(isolate_request_id)
        self._start_compiled_requests(isolated)
        scheduled, executed = self._pipeline.step(isolated)
        texts, finish_reasons = self._detokenize(executed.tokens)
        self._update_scheduler(scheduled, executed, finish_reasons)
        started, outputs = self._outputs_of_step(scheduled, executed, texts)
        outputs += self._accept_drafts(scheduled, executed)
        return self._build_output(scheduled, started, outputs)

    def drain(self) -> None:
        """Wait for the step in flight; the next `step` reports it. Raises `EngineDead`."""
        self._pipeline.drain()

    def queue_positions(self) -> list[QueuePosition]:
        """Waiting outputs: the queue from its head, then deferred outputs."""
        return queue_positions(self.scheduler)

    def request_positions(self) -> list[RequestPosition]:
        """Requests of which no output runs, in the order of `queue_positions`."""
        return request_positions(self.scheduler)

    def _submit_grammar(self, request: RequestState) -> None:
        try:
            self._grammars.submit(request)
        except Exception:
            self.discard(request.request_id)
            raise

    def _finish(self, request: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """Finish the unfinished outputs of a request; the next step reports them."""
        self._grammars.cancel(request)
        for output in request.outputs:
            if not output.sequence.is_finished():
                output.error = error
                output.flush()
                self.scheduler.abort(output.sequence, reason)

    # The stages of a step, in order.

    def _expire_deadlines(self) -> None:
        for request, error in self._deadlines.pop_expired(self._clock()):
            self._finish(request, FinishReason.TIMEOUT, error)

    def _sequences_of(self, request_id: str | None) -> list[Sequence] | None:
        """None without an id; no sequences for an unknown one."""
        if request_id is None:
            return None
        request = self._requests.get(request_id)
        return [output.sequence for output in request.outputs] if request else []

    def _start_compiled_requests(self, isolated: list[Sequence] | None) -> None:
        """Queue requests whose grammar is compiled, and fail those whose grammar is invalid."""
        if not self._grammars:
            return
        running, queue = self.scheduler.running_queue, self.scheduler.waiting_queue
        if isolated is None:
            is_idle = not running and not queue
        else:
            is_idle = not any(sequence in running or sequence in queue for sequence in isolated)
        for request, error in self._grammars.pop_compiled(is_idle=is_idle):
            if error:
                self._finish(request, FinishReason.ERROR, error)
            else:
                self._parallel_outputs.start(request)

    def _detokenize(
        self, tokens: dict[Sequence, SampledToken]
    ) -> tuple[dict[Sequence, str], dict[Sequence, FinishReason]]:
        """The text that each new token releases, and the finish reasons of these tokens.

        A token that cannot be detokenized becomes an error in `tokens`.
        """
        now = self._clock()
        texts: dict[Sequence, str] = {}
        finish_reasons: dict[Sequence, FinishReason] = {}
        with self._recorder.stage("detokenize"):
            for sequence, sampled in tokens.items():
                output = self._outputs[sequence]
                if sampled.token_id is None:
                    output.fail(sampled.error or "no token was sampled")
                    finish_reasons[sequence] = FinishReason.ERROR
                    continue
                try:
                    text, reason = output.add_token(sampled.token_id, self._rules)
                except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
                    output.fail(describe(error))
                    finish_reasons[sequence] = FinishReason.ERROR
                    tokens[sequence] = SampledToken(None, output.error)
                    continue
                texts[sequence] = text
                self._recorder.record_token(output, now)
                if reason:
                    finish_reasons[sequence] = reason
        return texts, finish_reasons

    def _update_scheduler(
        self,
        scheduled: SchedulerOutputs,
        executed: ExecutedStep,
        finish_reasons: dict[Sequence, FinishReason],
    ) -> None:
        with self._recorder.stage("update"):
            self.scheduler.update(scheduled, executed.tokens, finish_reasons)
            stepped = (item.sequence for item in scheduled.scheduled)
            self._parallel_outputs.enqueue_followers(chain(stepped, self.scheduler.finished_sequences))

    def _outputs_of_step(
        self, scheduled: SchedulerOutputs, executed: ExecutedStep, texts: dict[Sequence, str]
    ) -> tuple[tuple[str, ...], list[SequenceOutput]]:
        """The requests that this step scheduled first, and the new tokens."""
        with self._recorder.stage("update"):
            started = self._record_first_scheduled(scheduled, executed)
            return started, self._outputs_of(texts, executed.tokens)

    def _outputs_of(
        self, texts: dict[Sequence, str], tokens: dict[Sequence, SampledToken]
    ) -> list[SequenceOutput]:
        """One for each newest token, which released a text."""
        return [self._outputs[sequence].to_output(text, tokens[sequence]) for sequence, text in texts.items()]

    def _accept_drafts(self, scheduled: SchedulerOutputs, executed: ExecutedStep) -> list[SequenceOutput]:
        """Append the tokens after drafted ones, as if each had been sampled by a step of its own."""
        outputs: list[SequenceOutput] = []
        if not scheduled.drafts:
            return outputs
        self.scheduler.record_drafts(scheduled.drafts, executed.accepted)
        self._recorder.record_drafts(scheduled.drafts, executed.accepted)
        for tokens in executed.accepted_tokens():
            texts, finish_reasons = self._detokenize(tokens)
            with self._recorder.stage("update"):
                self.scheduler.accept(tokens, finish_reasons)
                outputs += self._outputs_of(texts, tokens)
        return outputs

    def _build_output(
        self, scheduled: SchedulerOutputs, started: tuple[str, ...], outputs: list[SequenceOutput]
    ) -> StepOutput:
        """New tokens, finishes since the last step, and the report."""
        with self._recorder.stage("update"):
            outputs += self._pop_finished(outputs)
        lanes = step_lanes(scheduled, self.scheduler) if self.records_lanes else None
        report = self._recorder.build_report(scheduled, self.scheduler, lanes)
        return StepOutput(outputs=tuple(outputs), started=started, report=report)

    def _record_first_scheduled(self, scheduled: SchedulerOutputs, executed: ExecutedStep) -> tuple[str, ...]:
        """The requests that this step scheduled first. Also stores the logprobs of prompts."""
        # A sequence that is scheduled first is either prefilled or was found in the prefix cache.
        if not scheduled.prefill and not scheduled.num_prefix_queried_tokens:
            return ()
        started: list[str] = []
        for item in scheduled.scheduled:
            request, scheduled_at = self._outputs[item.sequence].request, item.sequence.scheduled_at
            if request.scheduled_at is None and scheduled_at is not None:
                self._recorder.record_scheduled(request, scheduled_at)
                request.num_cached_tokens = item.sequence.num_cached_tokens
                started.append(request.request_id)
            if logprobs := executed.prompt_logprobs.get(item.sequence):
                request.add_prompt_logprobs(item.start + item.logits_from, logprobs)
        return tuple(started)

    def _pop_finished(self, reported: list[SequenceOutput]) -> list[SequenceOutput]:
        """Drop the state of finished outputs. Returns the finishes that come without a token of this step."""
        finished, now = self.scheduler.pop_finished(), self._clock()
        if not finished:
            return []
        with_token = {(one.request_id, one.index) for one in reported if one.finish_reason}
        outputs = [
            self._outputs[sequence].to_output(None, None)
            for sequence in finished
            if (sequence.request_id, sequence.index) not in with_token
        ]
        for request in dict.fromkeys(self._outputs.pop(sequence).request for sequence in finished):
            if request.is_finished:
                self._recorder.record_finished(request, now)
                del self._requests[request.request_id]
        return outputs
