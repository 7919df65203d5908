"""One step at a time: the scheduler decides, the runner executes, the sequences remember.

Law: `step()` is the heartbeat; everything that a request can meet happens between or inside steps, and one
request's fault stays its own. Knows no transport and no tensors.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer, Tokenizer
from engine.errors import InvalidParameter
from engine.outputs import (
    SampledToken,
    SchedulerOutputs,
    SequenceOutput,
    StepOutput,
    WaitingReason,
)
from engine.reporting import RequestTimes, StepLog
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from engine.step_execution import Runner, Sampler, StepExecution
from engine.step_timer import StepTimer
from engine.stopping import StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSequence:
    """Where a request stands in line: `position` from 1, tokens to compute before it, and why it waits."""

    request_id: str
    position: int
    tokens_ahead: int
    reason: WaitingReason


@dataclass(slots=True)
class _Request:
    """What the engine keeps of a request beside its sequence."""

    sequence: Sequence
    text: Detokenizer
    times: RequestTimes
    held_text: str = ""
    error: str | None = None


class Engine:
    """Continuous batching of one model on one device.

    `runner` and `sampler` do the device's work (see `engine/step_execution.py`), `tokenizer` turns ids into
    text, `eos_token_ids` are the model's ends. `clock` gives seconds that never go back.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self._execution = StepExecution(runner, sampler)
        self._tokenizer = tokenizer
        self._stop_rules = StopRules(config, eos_token_ids)
        self._vocab_size = vocab_size
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """There is something to compute, or an end that `step()` has not told yet."""
        return self.scheduler.has_unfinished_sequences() or bool(self.scheduler.finished_sequences)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running_queue)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting_queue)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float,
        priority: int = 2,
        output_token_ids: list[int] | None = None,
        waited_seconds: float = 0.0,
    ) -> None:
        """Take a request into the waiting queue.

        `arrival` orders requests of one `priority` (lower first in both). `output_token_ids`: what an earlier
        engine generated; the request goes on after it, and its text is not told again. `waited_seconds`: how
        long it waited elsewhere, for the times in reports.

        Raises `InvalidParameter` (of which `NeverFits` is one), and takes nothing, when it cannot be served.
        """
        self._check(request_id, prompt_token_ids, params)
        sequence = Sequence(
            request_id,
            prompt_token_ids,
            params,
            arrival=arrival,
            priority=priority,
            output_token_ids=output_token_ids,
        )
        request = _Request(
            sequence,
            Detokenizer(self._tokenizer, prompt_token_ids, params),
            RequestTimes(self._clock() - waited_seconds, resumed=bool(output_token_ids)),
        )
        ended = self._replay(request) if output_token_ids else None
        self.scheduler.add_sequence(sequence)
        self._requests[request_id] = request
        if ended:
            self.scheduler.abort(sequence, ended)

    def cancel(self, request_id: str) -> bool:
        """End a request; the next step tells its end. False if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None or request.sequence.is_finished():
            return False
        self.scheduler.abort(request.sequence, FinishReason.CANCELLED)
        return True

    def discard(self, request_id: str) -> bool:
        """Forget a request without a word: it is another's now. False if it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self.scheduler.abort(request.sequence, FinishReason.CANCELLED)
        self.scheduler.finished_sequences.remove(request.sequence)
        return True

    def step(self) -> StepOutput:
        """Compute one step, and tell what came of it.

        Raises `EngineDead` when nothing can be computed any more.
        """
        self._num_steps += 1
        timer = StepTimer(self._clock)
        step_log = StepLog(self._num_steps, timer)
        with timer.stage("schedule"):
            outputs = self.scheduler.schedule()
        tokens = self._execution.run(outputs, timer).tokens
        started = self._start_times(outputs, step_log)
        with timer.stage("detokenize"):
            pieces, finishes = self._texts(tokens, step_log)
        with timer.stage("update"):
            self.scheduler.update(outputs, tokens, finishes)
            told = self._tell(pieces, step_log)
        return StepOutput(outputs=told, started=started, report=step_log.close(outputs, self.scheduler))

    def waiting(self) -> list[WaitingSequence]:
        """The line as it stands, from its head."""
        line: list[WaitingSequence] = []
        tokens_ahead = sum(one.num_uncomputed_tokens for one in self.scheduler.running_queue)
        for position, sequence in enumerate(self.scheduler.waiting_queue, start=1):
            reason = self.scheduler.waiting_reason(sequence)
            line.append(
                WaitingSequence(
                    request_id=sequence.request_id,
                    position=position,
                    tokens_ahead=tokens_ahead,
                    reason=reason,
                )
            )
            tokens_ahead += self._num_tokens_to_come(sequence)
        return line

    def _check(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if request_id in self._requests:
            raise InvalidParameter("id", f"{request_id} is being served already")
        if not prompt_token_ids:
            raise InvalidParameter("prompt", "must have at least one token")
        for field, token_ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
            for token_id in token_ids:
                if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                    raise InvalidParameter(
                        field, f"token id {token_id!r:.40} is outside the vocabulary of {self._vocab_size}"
                    )

    def _replay(self, request: _Request) -> FinishReason | None:
        """Bring the text of a resumed request to where its earlier engine left it; its end, if that came."""
        sequence, text = request.sequence, request.text
        output_token_ids = sequence.output_token_ids
        if self._stop_rules.is_stop_token(sequence, output_token_ids[-1]):
            output_token_ids.pop()
            reason: FinishReason | None = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if self._stop_rules.is_full(sequence, sequence.num_tokens) else None
        for token_id in output_token_ids:
            text.push(token_id)
        reason = FinishReason.STOP if text.stopped else reason
        if reason:
            request.held_text = text.close()
        return reason

    def _start_times(self, outputs: SchedulerOutputs, step_log: StepLog) -> tuple[str, ...]:
        """Note when requests were first scheduled; these are told."""
        now = self._clock()
        started: list[str] = []
        for item in outputs.prefill:
            times = self._requests[item.sequence.request_id].times
            if times.started is None:
                step_log.started(times, now)
                started.append(item.sequence.request_id)
        return tuple(started)

    def _texts(
        self, tokens: dict[Sequence, SampledToken], step_log: StepLog
    ) -> tuple[dict[Sequence, str], dict[Sequence, FinishReason]]:
        """The text that each new token sets free, and the ends that tokens and texts bring.

        A token whose text cannot be made becomes an error in `tokens`.
        """
        now = self._clock()
        pieces: dict[Sequence, str] = {}
        finishes: dict[Sequence, FinishReason] = {}
        for sequence, sampled in tokens.items():
            request = self._requests[sequence.request_id]
            try:
                piece, reason = self._text(request, sampled)
            except Exception as error:  # noqa: BLE001 - a tokenizer raises what it likes
                request.error = request.error or f"{type(error).__name__}: {error}"
                reason = FinishReason.ERROR
                tokens[sequence] = SampledToken(None, request.error)
            else:
                if piece is not None:
                    pieces[sequence] = piece
                    step_log.token(request.times, now)
            if reason:
                finishes[sequence] = reason
        return pieces, finishes

    def _text(self, request: _Request, sampled: SampledToken) -> tuple[str | None, FinishReason | None]:
        """The text that one more token sets free (None without a token), and the end that it brings."""
        text = request.text
        if sampled.token_id is None:
            request.error = sampled.error
            request.held_text = text.close()
            return None, FinishReason.ERROR
        reason = self._stop_rules.reason(request.sequence, sampled.token_id)
        piece = "" if reason is FinishReason.STOP else text.push(sampled.token_id)
        reason = FinishReason.STOP if text.stopped else reason
        request.held_text = text.close() if reason else ""
        return piece, reason

    def _tell(self, pieces: dict[Sequence, str], step_log: StepLog) -> tuple[SequenceOutput, ...]:
        """The outputs of this step: new tokens, and the ends since the last."""
        ended = self.scheduler.take_finished()
        told = [self._output(sequence, piece) for sequence, piece in pieces.items()]
        told += [self._output(sequence, None) for sequence in ended if sequence not in pieces]
        now = self._clock()
        for sequence in ended:
            step_log.finished(sequence, self._requests.pop(sequence.request_id).times, now)
        return tuple(told)

    def _output(self, sequence: Sequence, piece: str | None) -> SequenceOutput:
        request = self._requests[sequence.request_id]
        return SequenceOutput(
            request_id=sequence.request_id,
            token_id=None if piece is None else sequence.token_ids[-1],
            text=piece or "",
            held_text=request.held_text,
            finish_reason=sequence.finish_reason,
            error=request.error,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _num_tokens_to_come(self, sequence: Sequence) -> int:
        room = self.config.max_model_len - sequence.num_prompt_tokens
        most = min(sequence.params.max_tokens or room, room)
        return sequence.num_uncomputed_tokens + max(0, most - sequence.num_output_tokens)
