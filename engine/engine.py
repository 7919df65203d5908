"""One step at a time: the scheduler decides, the runner executes, the sequences remember.

Law: `step()` is the heartbeat; everything that a request can meet happens between or inside steps, and one
request's fault stays its own. Knows no transport and no tensors.
"""

import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.outputs import SampledToken, SchedulerOutputs, SequenceOutput, StepOutput
from engine.requests.deadlines import DeadlineHeap
from engine.requests.engine_request import EngineRequest
from engine.requests.grammar_gate import GrammarCompiler, GrammarGate
from engine.requests.input_processor import InputProcessor
from engine.requests.parallel_outputs import ParallelOutputs
from engine.requests.request_factory import RequestFactory
from engine.requests.request_state import Output, Request, describe
from engine.requests.stop_rules import StopRules
from engine.scheduling.queue_positions import QueuePosition, queue_positions
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from engine.steps.fault_isolation import ExecutedStep, Runner, Sampler, StepExecution
from engine.steps.pipeline import AsyncExecutor, Pipeline
from engine.steps.step_report import StepLog
from engine.steps.step_timer import StepTimer
from engine.text.detokenizer import Tokenizer

__all__ = ["Engine", "QueuePosition"]


class Engine:
    """Continuous batching of one model on one device.

    `runner` and `sampler` do the device's work (see `engine/steps/fault_isolation.py`). `tokenizer` turns ids
    into text, `eos_token_ids` are the model's ends. `grammar_compiler`: see
    `engine/requests/grammar_gate.py`; None: structured outputs are refused. `launcher`: see
    `engine/steps/pipeline.py`; None: each step ends before the next one is decided. `clock` returns monotonic
    seconds.
    """

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
        launcher: AsyncExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, clock=clock)
        self._rules = StopRules(config)
        self._pipeline = Pipeline(self.scheduler, StepExecution(runner, sampler), self._rules, launcher)
        resolver = InputProcessor(tokenizer, eos_token_ids, vocab_size)
        self._request_factory = RequestFactory(config, tokenizer, resolver, self._rules, clock)
        self._grammars = GrammarGate(grammar_compiler, self._rules)
        self._parallel_outputs = ParallelOutputs(self.scheduler)
        self._deadlines = DeadlineHeap[Request]()
        self._clock = clock
        self._requests: dict[str, Request] = {}
        #: Those whose end has not been told.
        self._outputs: dict[Sequence, Output] = {}
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """There is something to compute or to wait for, or an end that `step()` has not told yet."""
        return self.scheduler.has_unfinished_sequences() or bool(self.scheduler.finished_sequences)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot: a request has up to n."""
        return len(self.scheduler.running_queue)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not, whatever they wait for."""
        return self.scheduler.num_waiting

    @property
    def is_compiling(self) -> bool:
        """The grammar of some request is being compiled, or waits for that."""
        return self._grammars.is_awaited

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InvalidParameter` and changes nothing if it cannot be served."""
        if request.request_id in self._requests:
            raise InvalidParameter("id", f"{request.request_id} is being served already")
        self._grammars.check(request.params.structured_outputs)
        state = self._request_factory.make(request)
        self._parallel_outputs.hold(state)
        self._requests[request.request_id] = state
        self._outputs.update((output.sequence, output) for output in state.outputs)
        self._deadlines.add(state, state.times.queued_at, request.deadlines)
        if state.needs_grammar:
            self._submit_grammar(state)
        else:
            self._parallel_outputs.start(state)

    def cancel(self, request_id: str) -> bool:
        """End all outputs of a request; the next step tells it. False if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None or request.is_over:
            return False
        self._end(request, FinishReason.CANCELLED)
        return True

    def discard(self, request_id: str) -> bool:
        """Forget a request without a word: it is another's now. False if it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._grammars.forget(request)
        for output in request.outputs:
            self._outputs.pop(output.sequence, None)
            self.scheduler.abort(output.sequence, FinishReason.CANCELLED)
        self._parallel_outputs.settle(output.sequence for output in request.outputs)
        finished = self.scheduler.take_finished()
        self.scheduler.finished_sequences += [one for one in finished if one in self._outputs]
        return True

    def serves(self, request_id: str) -> bool:
        """Whether there is something to do for this request, if only to tell its end."""
        return request_id in self._requests

    def step(self, only: str | None = None) -> StepOutput:
        """Finish one step, and tell what came of it; with a launcher the next one is under way by then.

        `only`: a request, of which alone anything is computed from now on; the others keep what they have,
        unless it needs their slots or blocks, and get what was under way. All ends are told. Raises
        `EngineDead` when nothing can be computed any more.
        """
        self._num_steps += 1
        self._expire_deadlines()
        taking_part = None if only is None else self._sequences_of(only)
        self._start_compiled_ones(taking_part)
        timer = StepTimer(self._clock)
        step_log = StepLog(self._num_steps, timer)
        outputs, executed = self._pipeline.step(taking_part, timer)
        tokens = dict(executed.tokens)
        started = self._note_progress(outputs, executed, step_log)
        with timer.stage("detokenize"):
            pieces, finishes = self._detokenize(tokens, step_log)
        with timer.stage("update"):
            self.scheduler.update(outputs, tokens, finishes)
            told = self._build_outputs(outputs, tokens, pieces, step_log)
        return StepOutput(outputs=told, started=started, report=step_log.close(outputs, self.scheduler))

    def drain(self) -> None:
        """Wait for what is under way on the device; the next step tells it. Raises `EngineDead`."""
        self._pipeline.drain(StepTimer(self._clock))

    def waiting(self) -> list[QueuePosition]:
        """The line as it stands, from its head; then those held outside of it."""
        return queue_positions(self.scheduler)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End what of a request has not ended; the next step tells it."""
        self._grammars.forget(request)
        for output in request.outputs:
            if not output.sequence.is_finished():
                output.error = error
                output.close()
                self.scheduler.abort(output.sequence, reason)

    def _submit_grammar(self, request: Request) -> None:
        try:
            self._grammars.submit(request)
        except Exception:
            self.discard(request.request_id)
            raise

    def _expire_deadlines(self) -> None:
        for request, reason in self._deadlines.pop_expired(self._clock()):
            self._end(request, FinishReason.TIMEOUT, reason)

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        request = self._requests.get(request_id)
        return [output.sequence for output in request.outputs] if request else []

    def _start_compiled_ones(self, taking_part: list[Sequence] | None) -> None:
        if not self._grammars.is_awaited:
            return
        running, line = self.scheduler.running_queue, self.scheduler.waiting_queue
        if taking_part is None:
            is_idle = not running and not line
        else:
            is_idle = not any(one in running or one in line for one in taking_part)
        for request, error in self._grammars.take_ready(is_idle=is_idle):
            if error:
                self._end(request, FinishReason.ERROR, error)
            else:
                self._parallel_outputs.start(request)

    def _note_progress(
        self, outputs: SchedulerOutputs, executed: ExecutedStep, step_log: StepLog
    ) -> tuple[str, ...]:
        """Note which requests were first scheduled, these are told, and the logprobs of prompts."""
        # Whoever is scheduled for the first time was admitted by this step, with all tokens that it knows.
        if not outputs.prefill and not outputs.num_prefix_queried_tokens:
            return ()
        started: list[str] = []
        for item in outputs.scheduled:
            request, scheduled_at = self._outputs[item.sequence].request, item.sequence.scheduled_at
            if request.times.started is None and scheduled_at is not None:
                step_log.started(request.times, scheduled_at)
                request.num_cached_tokens = item.sequence.num_cached_tokens
                started.append(request.request_id)
            if logprobs := executed.prompt_logprobs.get(item.sequence):
                request.note_prompt_logprobs(item.start + item.logits_from, logprobs)
        return tuple(started)

    def _detokenize(
        self, tokens: dict[Sequence, SampledToken], step_log: StepLog
    ) -> tuple[dict[Sequence, str], dict[Sequence, FinishReason]]:
        """The text that each new token sets free, and the ends that tokens and texts bring.

        A token whose text cannot be made becomes an error in `tokens`.
        """
        now = self._clock()
        pieces: dict[Sequence, str] = {}
        finishes: dict[Sequence, FinishReason] = {}
        for sequence, sampled in tokens.items():
            output = self._outputs[sequence]
            if sampled.token_id is None:
                output.fail(sampled.error or "there is no token")
                finishes[sequence] = FinishReason.ERROR
                continue
            try:
                piece, reason = output.take(sampled.token_id, self._rules)
            except Exception as error:  # noqa: BLE001 - a tokenizer raises what it likes
                output.fail(describe(error))
                finishes[sequence] = FinishReason.ERROR
                tokens[sequence] = SampledToken(None, output.error)
                continue
            pieces[sequence] = piece
            step_log.token(output.request.times, output.last_token, now)
            output.last_token = now
            if reason:
                finishes[sequence] = reason
        return pieces, finishes

    def _build_outputs(
        self,
        outputs: SchedulerOutputs,
        tokens: dict[Sequence, SampledToken],
        pieces: dict[Sequence, str],
        step_log: StepLog,
    ) -> tuple[SequenceOutput, ...]:
        """The outputs of this step: new tokens, and the ends since the last."""
        ended = self.scheduler.take_finished()
        self._parallel_outputs.settle(item.sequence for item in outputs.scheduled)
        self._parallel_outputs.settle(ended)
        told = [self._outputs[one].told(piece, tokens[one]) for one, piece in pieces.items()]
        told += [self._outputs[one].told(None, None) for one in ended if one not in pieces]
        now = self._clock()
        for request in dict.fromkeys(self._outputs.pop(one).request for one in ended):
            if request.is_over:
                step_log.finished(request, now)
                del self._requests[request.request_id]
        return tuple(told)
