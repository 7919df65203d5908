"""What the engine keeps of one request: its outputs, their texts, and its moments.

Law: a resumed output is folded token by token as a live one is, so both stand at the same place. Decides
nothing about other requests; knows no scheduler.
"""

from dataclasses import dataclass, field

from engine.outputs import ResumedOutput, SampledToken, SequenceOutput, TokenLogprobs
from engine.requests.deadlines import Limit
from engine.requests.stop_rules import StopRules
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from engine.text.detokenizer import Detokenizer


@dataclass(slots=True)
class RequestTimes:
    """Moments of one request on the engine's clock. `resumed`: its first token came before this engine.

    `started`: when the step that first scheduled it was decided; set when that step is reported.
    """

    queued_at: float
    priority: int = 2
    resumed: bool = False
    started: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class Output:
    """One output in flight. `end`: it was at its end when it was resumed. `last_token`: when it was drawn."""

    sequence: Sequence
    text: Detokenizer
    request: "Request"
    held_text: str = ""
    error: str | None = None
    end: FinishReason | None = None
    last_token: float | None = None

    def take(self, token_id: int, rules: StopRules) -> tuple[str, FinishReason | None]:
        """The text that one more token sets free, and the end that it brings.

        Raises whatever tokenizer and grammar raise.
        """
        sequence, text = self.sequence, self.text
        reason = rules.reason(sequence, token_id)
        if reason is FinishReason.STOP:
            self.held_text = text.close(token_id)
            return "", reason
        is_complete = sequence.constraints.grammar is not None and rules.completes_grammar(sequence, token_id)
        piece = text.push(token_id)
        if is_complete or text.stopped:
            reason = FinishReason.STOP
        if reason:
            self.held_text = text.close()
        return piece, reason

    def resume(self, token_ids: tuple[int, ...], rules: StopRules) -> None:
        """Go on after tokens of an earlier engine, whose text was told by it."""
        if not token_ids:
            return
        # Only the last can have been the end, even where this engine's limits are lower.
        for token_id in token_ids[:-1]:
            self.text.push(token_id)
            self.sequence.append(token_id)
        _, self.end = self.take(token_ids[-1], rules)
        self.sequence.append(token_ids[-1])

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.close()

    def close(self) -> None:
        """Set free what is held back. A tokenizer that fails at it loses that text and not the end."""
        try:
            self.held_text = self.text.close()
        except Exception as error:  # noqa: BLE001 - a tokenizer raises what it likes
            self.error = self.error or describe(error)

    def told(self, piece: str | None, sampled: SampledToken | None) -> SequenceOutput:
        """What a step tells: a token and the text that it set free, or with None the end alone."""
        sequence, request, has_token = self.sequence, self.request, piece is not None
        # In the order of its fields: by name it takes twice the time, and there is one for each token.
        return SequenceOutput(
            sequence.request_id,
            sequence.index,
            sequence.token_ids[-1] if has_token else None,
            piece or "",
            self.held_text,
            sequence.finish_reason,
            self.error,
            request.num_cached_tokens,
            sampled.logprobs if has_token and sampled else None,
            request.take_prompt_logprobs() if has_token and request.prompt_logprobs is not None else None,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request in flight. `outputs`: those that run here, by index; `ended_before`: those that do not.

    `num_cached_tokens`: prompt tokens that were found computed when the request first started; what its
    outputs found of each other does not count. `prompt_logprobs`: so far; None: not wanted, or told.
    """

    request_id: str
    params: SamplingParams
    times: RequestTimes
    outputs: list[Output] = field(default_factory=list)
    ended_before: tuple[ResumedOutput, ...] = ()
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def is_over(self) -> bool:
        return all(output.sequence.is_finished() for output in self.outputs)

    @property
    def needs_grammar(self) -> bool:
        return self.params.structured_outputs is not None

    def is_subject_to(self, limit: Limit) -> bool:
        """See `engine.requests.deadlines.Timed`. The tokens of an earlier engine count."""
        times = self.times
        if limit is Limit.QUEUE:
            is_met = times.resumed or any(one.sequence.scheduled_at is not None for one in self.outputs)
        else:
            is_met = limit is Limit.TTFT and (times.resumed or times.first_token is not None)
        return not is_met and not self.is_over

    def choose_head(self) -> Sequence | None:
        """The first output that has not ended: it computes the prompt that all share, and its logprobs."""
        head = next((one.sequence for one in self.outputs if not one.sequence.is_finished()), None)
        if head is not None and self.prompt_logprobs is not None:
            head.params = head.params.for_output(
                seed=head.params.seed, prompt_logprobs=self.params.prompt_logprobs
            )
        return head

    def note_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Those of the prompt tokens after place `start`; after a preemption the same ones come again."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[start + 1 : start + 1 + len(logprobs)] = logprobs

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Once: at the first token of all, which comes after the whole prompt."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return None if logprobs is None else tuple(logprobs)


def describe(error: Exception) -> str:
    """What a failed request tells of the reason."""
    return f"{type(error).__name__}: {error}"[:500]
