"""Builds the state of a new request: checked, resolved to token ids, and resumed.

A request that cannot be served is refused here, before any state changes.
"""

import itertools
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.outputs import ResumedOutput
from engine.requests.engine_request import EngineRequest
from engine.requests.input_processor import InputProcessor, ResolvedParams
from engine.requests.parallel_outputs import params_of_output
from engine.requests.request_state import OutputState, RequestState
from engine.requests.stop_rules import StopRules
from engine.sequence import Sequence
from engine.text.detokenizer import Detokenizer, Tokenizer


class RequestFactory:
    """`rules`: the stop rules that sampled tokens are checked against."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        input_processor: InputProcessor,
        rules: StopRules,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._input_processor = input_processor
        self._rules = rules
        self._clock = clock
        self._serials = itertools.count()

    def make(self, request: EngineRequest) -> RequestState:
        """Raises `InvalidParameter`, and any exception of the tokenizer."""
        params = request.params
        self._input_processor.check(request.prompt_token_ids, params)
        resolved = self._input_processor.resolve(params)
        resumed_by_index = _by_index(request.resumed, params.n)
        for resumed in request.resumed:
            self._input_processor.check_resumed(resumed.token_ids)
        state = RequestState(
            request.request_id,
            params,
            queued_at=self._clock() - request.waited_seconds,
            priority=request.priority,
            is_resumed=any(one.token_ids for one in request.resumed),
            resumed_as_finished=tuple(one for one in request.resumed if one.finish_reason),
        )
        # An earlier engine has reported those of the prompt with the first token.
        if params.prompt_logprobs is not None and not state.is_resumed:
            state.prompt_logprobs = [None]
        cache_salt = self._cache_salt(request)
        for index in range(params.n):
            resumed = resumed_by_index.get(index, ResumedOutput(index, ()))
            if resumed.finish_reason is None:
                state.outputs.append(self._make_output(state, request, resolved, resumed, cache_salt))
        return state

    def _make_output(
        self,
        state: RequestState,
        request: EngineRequest,
        resolved: ResolvedParams,
        resumed: ResumedOutput,
        cache_salt: bytes,
    ) -> OutputState:
        sequence = Sequence(
            request.request_id,
            request.prompt_token_ids,
            params_of_output(request.params, resumed.index),
            arrival_time=request.arrival_time,
            index=resumed.index,
            priority=request.priority,
            queued_at=state.queued_at,
            cache_salt=cache_salt,
            constraints=resolved.constraints,
        )
        detokenizer = Detokenizer(
            self._tokenizer, request.prompt_token_ids, request.params, resolved.end_texts
        )
        output = OutputState(sequence, detokenizer, state)
        output.resume(resumed.token_ids, self._rules)
        return output

    def _cache_salt(self, request: EngineRequest) -> bytes:
        """Without prefix caching, only the outputs of one request share blocks."""
        if self._config.prefix_caching or request.params.n == 1:
            return request.cache_salt
        return f"{next(self._serials)} {request.request_id}".encode()


def _by_index(resumed: tuple[ResumedOutput, ...], n: int) -> dict[int, ResumedOutput]:
    """Raises `InvalidParameter` if `resumed` does not fit a request of `n` outputs with work left."""
    by_index = {output.index: output for output in resumed}
    if len(by_index) < len(resumed) or not by_index.keys() <= set(range(n)):
        raise InvalidParameter("resumed", f"must name outputs 0 to {n - 1}, each at most once")
    if len(by_index) == n and all(output.finish_reason for output in resumed):
        raise InvalidParameter("resumed", "all outputs have finished; nothing is left to run")
    return by_index
