"""State of one request in the engine: its outputs, their text and its timestamps.

Tokens of a resumed output pass through the same code as newly sampled ones, so that both reach the same
state.
"""

from dataclasses import dataclass, field

from engine.outputs import ResumedOutput, SampledToken, SequenceOutput, TokenLogprobs
from engine.requests.deadlines import Limit
from engine.requests.stop_rules import StopRules
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from engine.text.detokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class OutputState:
    """One unfinished output of a request.

    `held_text`: text held back until the finish. `resumed_finish_reason`: why the output was already complete
    when it was resumed. `last_token_at`: when its newest token was received, on the engine's clock.
    """

    sequence: Sequence
    detokenizer: Detokenizer
    request: "RequestState"
    held_text: str = ""
    error: str | None = None
    resumed_finish_reason: FinishReason | None = None
    last_token_at: float | None = None

    def add_token(self, token_id: int, rules: StopRules) -> tuple[str, FinishReason | None]:
        """Returns the text that the token releases, and the finish reason if it finishes the output.

        Raises any exception of the tokenizer or the grammar.
        """
        sequence, detokenizer = self.sequence, self.detokenizer
        reason = rules.reason(sequence, token_id)
        if reason is FinishReason.STOP:
            self.held_text = detokenizer.close(token_id)
            return "", reason
        is_complete = sequence.constraints.grammar is not None and rules.completes_grammar(sequence, token_id)
        text = detokenizer.push(token_id)
        if is_complete or detokenizer.stopped:
            reason = FinishReason.STOP
        if reason:
            self.held_text = detokenizer.close()
        return text, reason

    def resume(self, token_ids: tuple[int, ...], rules: StopRules) -> None:
        """Continue after tokens of an earlier engine, which has already reported their text."""
        if not token_ids:
            return
        # Only the last token can have finished the output, even if the limits of this engine are lower.
        for token_id in token_ids[:-1]:
            self.detokenizer.push(token_id)
            self.sequence.append(token_id)
        _, self.resumed_finish_reason = self.add_token(token_ids[-1], rules)
        self.sequence.append(token_ids[-1])

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.flush()

    def flush(self) -> None:
        """Release the text held back by the detokenizer. If the tokenizer fails, that text is lost."""
        try:
            self.held_text = self.detokenizer.close()
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            self.error = self.error or describe(error)

    def to_output(self, text: str | None, sampled: SampledToken | None) -> SequenceOutput:
        """The output of a step: a token and the text it released, or with None only the finish."""
        sequence, request, has_token = self.sequence, self.request, text is not None
        # Positional arguments: keywords double the time, and there is one output per token.
        return SequenceOutput(
            sequence.request_id,
            sequence.index,
            sequence.token_ids[-1] if has_token else None,
            text or "",
            self.held_text,
            sequence.finish_reason,
            self.error,
            request.num_cached_tokens,
            sampled.logprobs if has_token and sampled else None,
            request.pop_prompt_logprobs() if has_token and request.prompt_logprobs is not None else None,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight. Timestamps are on the engine's clock; None: not reached.

    `queued_at`: when the request was accepted. `is_resumed`: an earlier engine has reported its first token.
    `outputs`: those that run here, by index. `resumed_as_finished`: those that had finished before.
    `scheduled_at`: time of the decision that first scheduled it; set when that step is reported.
    `num_cached_tokens`: prompt tokens found in the prefix cache when it was first scheduled; hits among its
    own outputs do not count. `prompt_logprobs`: those computed so far; None: not requested, or already
    reported.
    """

    request_id: str
    params: SamplingParams
    queued_at: float
    priority: int = 2
    is_resumed: bool = False
    resumed_as_finished: tuple[ResumedOutput, ...] = ()
    outputs: list[OutputState] = field(default_factory=list)
    scheduled_at: float | None = None
    first_token_at: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def is_finished(self) -> bool:
        return all(output.sequence.is_finished() for output in self.outputs)

    @property
    def needs_grammar(self) -> bool:
        return self.params.structured_outputs is not None

    def is_subject_to(self, limit: Limit) -> bool:
        """See `engine.requests.deadlines.Timed`. Tokens of an earlier engine count."""
        if self.is_finished:
            return False
        if limit is Limit.QUEUE:
            was_scheduled = any(output.sequence.scheduled_at is not None for output in self.outputs)
            return not (self.is_resumed or was_scheduled)
        if limit is Limit.TTFT:
            return not (self.is_resumed or self.first_token_at is not None)
        return True

    def choose_leader(self) -> Sequence | None:
        """The first unfinished output: it computes the prompt that all share, and its logprobs."""
        unfinished = (
            output.sequence
            for output in self.outputs
            if output.resumed_finish_reason is None and not output.sequence.is_finished()
        )
        leader = next(unfinished, None)
        if leader is not None and self.prompt_logprobs is not None:
            leader.params = leader.params.for_output(
                seed=leader.params.seed, prompt_logprobs=self.params.prompt_logprobs
            )
        return leader

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Add those of the prompt tokens after position `start`; a preempted prompt computes them again."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start + 1 : start + 1 + len(logprobs)] = logprobs

    def pop_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """The prompt logprobs, once: with the first token of any output, which follows the whole prompt."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return None if logprobs is None else tuple(logprobs)


def describe(error: Exception) -> str:
    """The error message of a failed request."""
    return f"{type(error).__name__}: {error}"[:500]
