"""Runs a list of prompts on an engine until all have finished.

Invariants: either all prompts are added or none runs; results are in the order of the prompts; the engine is
empty after a run, however it ends.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.offline.interrupts import delayed_interrupt
from engine.outputs import SequenceOutput, TokenLogprobs
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated text. `finish_reason`: stop, length or error; `error`: the error message.

    `token_ids` include the token that ended the text, if one did. `logprobs`: one per token, if requested.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The results of one prompt: `params.n` outputs, by index.

    `prompt_logprobs`: one per prompt token, None for the first, if requested. `num_cached_tokens`: prompt
    tokens found in the prefix cache.
    """

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """The error of the first output that failed. The others have their texts."""
        return next((output.error for output in self.outputs if output.error), None)


class OfflineRunner:
    """Runs one list of prompts at a time on an engine that it uses alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrivals = itertools.count()

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        on_progress: Callable[[int, int], None] = lambda *_: None,
    ) -> list[RequestOutput]:
        """Generate for each prompt with its parameters.

        `on_progress` is called after each step with the number of requests that finished in it and the number
        of tokens that it generated. Raises `InvalidParameter`, before anything runs, for a prompt that cannot
        be served, with its position in the list; and `EngineDead`. Ctrl-C ends the run between two steps.
        """
        results: dict[str, RequestOutput] = {}
        try:
            with delayed_interrupt() as raise_interrupt:
                for position, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
                    request_id = self._add(position, prompt, prompt_params)
                    outputs = [CompletionOutput(index=index) for index in range(prompt_params.n)]
                    results[request_id] = RequestOutput(prompt_token_ids=prompt, outputs=outputs)
                while self._engine.has_work:
                    step = self._engine.step()
                    for output in step.outputs:
                        _append(results[output.request_id], output)
                    on_progress(len(step.report.finished), step.report.num_generated_tokens)
                    raise_interrupt()
        finally:
            for request_id in results:
                self._engine.discard(request_id)
        return list(results.values())

    def _add(self, position: int, prompt: list[int], params: SamplingParams) -> str:
        arrival = next(self._arrivals)
        request_id = f"prompt-{arrival}"
        try:
            self._engine.add(EngineRequest(request_id, prompt, params, arrival_time=float(arrival)))
        except InvalidParameter as error:
            raise type(error)(f"prompt {position}: {error.field}", error.message) from error
        return request_id


def _append(result: RequestOutput, new: SequenceOutput) -> None:
    output = result.outputs[new.index]
    output.text += new.text
    if new.token_id is not None:
        output.token_ids.append(new.token_id)
    if new.logprobs is not None:
        output.logprobs = output.logprobs or []
        output.logprobs.append(new.logprobs)
    if new.prompt_logprobs is not None:
        result.prompt_logprobs = list(new.prompt_logprobs)
    if new.finish_reason:
        output.text += new.held_text
        output.finish_reason = new.finish_reason.value
        output.error = new.error
        result.num_cached_tokens = new.num_cached_tokens
