"""A list of prompts on an engine, to their ends: for people who have the list and no service.

Law: either all prompts are taken or none runs, results stand in the order of the prompts, and whatever ends a
run leaves the engine empty. Knows no model library.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.offline.interrupts import interrupts_held
from engine.outputs import SequenceOutput, TokenLogprobs
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One text of a request. `finish_reason`: stop, length or error; `error` says what failed.

    `token_ids` end with the token that ended the text, if one did. `logprobs`: one for each of them, where
    they were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What came of one prompt: `params.n` outputs, by index.

    `prompt_logprobs`: one for each prompt token, None for the first, where they were asked for.
    `num_cached_tokens`: prompt tokens that were computed for an earlier request.
    """

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """What failed first of its outputs; the others have their texts."""
        return next((output.error for output in self.outputs if output.error), None)


class OfflineRunner:
    """Runs lists of prompts, one list at a time, on an engine that serves nobody else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrivals = itertools.count()

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        on_progress: Callable[[int, int], None] = lambda *_: None,
    ) -> list[RequestOutput]:
        """Generate for each prompt with its parameters. `on_progress`: after each step, the requests that
        ended in it and the tokens that it generated.

        Raises `InvalidParameter`, before anything runs, for a prompt that cannot be served, with its place
        in the list; and `EngineDead`. Ctrl-C ends the run between two steps.
        """
        results: dict[str, RequestOutput] = {}
        try:
            with interrupts_held() as check_for_interrupt:
                for place, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
                    request_id = self._add(place, prompt, asked)
                    outputs = [CompletionOutput(index=index) for index in range(asked.n)]
                    results[request_id] = RequestOutput(prompt_token_ids=prompt, outputs=outputs)
                while self._engine.has_work:
                    step = self._engine.step()
                    for told in step.outputs:
                        _gather(results[told.request_id], told)
                    on_progress(len(step.report.finished), step.report.num_generated_tokens)
                    check_for_interrupt()
        finally:
            for request_id in results:
                self._engine.discard(request_id)
        return list(results.values())

    def _add(self, place: int, prompt: list[int], params: SamplingParams) -> str:
        arrival = next(self._arrivals)
        request_id = f"prompt-{arrival}"
        try:
            self._engine.add(EngineRequest(request_id, prompt, params, arrival_time=float(arrival)))
        except InvalidParameter as error:
            raise type(error)(f"prompt {place}: {error.field}", error.message) from error
        return request_id


def _gather(result: RequestOutput, told: SequenceOutput) -> None:
    output = result.outputs[told.index]
    output.text += told.text
    if told.token_id is not None:
        output.token_ids.append(told.token_id)
    if told.logprobs is not None:
        output.logprobs = output.logprobs or []
        output.logprobs.append(told.logprobs)
    if told.prompt_logprobs is not None:
        result.prompt_logprobs = list(told.prompt_logprobs)
    if told.finish_reason:
        output.text += told.held_text
        output.finish_reason = told.finish_reason.value
        output.error = told.error
        result.num_cached_tokens = told.num_cached_tokens
