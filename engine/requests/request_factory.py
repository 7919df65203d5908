"""Makes the outputs of a request from what was asked: checked, resolved to token ids, and resumed.

Law: what cannot be served is refused here, before anything is changed. Knows no scheduler.
"""

import itertools
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.outputs import ResumedOutput
from engine.requests.engine_request import EngineRequest
from engine.requests.input_processor import InputProcessor, Resolved, params_of_output
from engine.requests.request_state import Output, Request, RequestTimes
from engine.requests.stop_rules import StopRules
from engine.sequence import Sequence
from engine.text.detokenizer import Detokenizer, Tokenizer


class RequestFactory:
    """`rules` are those that live tokens will be held to."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        resolver: InputProcessor,
        rules: StopRules,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._input_processor = resolver
        self._rules = rules
        self._clock = clock
        self._serials = itertools.count()

    def make(self, new: EngineRequest) -> Request:
        """Raises `InvalidParameter`, or what the tokenizer raises."""
        params = new.params
        self._input_processor.check(new.prompt_token_ids, params)
        resolved = self._input_processor.resolve(params)
        before = _by_index(new.resumed, params.n)
        for one in new.resumed:
            self._input_processor.check_resumed(one.token_ids)
        times = RequestTimes(
            self._clock() - new.waited_seconds,
            new.priority,
            resumed=any(one.token_ids for one in new.resumed),
        )
        ended = tuple(one for one in new.resumed if one.finish_reason)
        request = Request(new.request_id, params, times, ended_before=ended)
        # Those of the prompt were told with the first token of all.
        if params.prompt_logprobs is not None and not times.resumed:
            request.prompt_logprobs = [None]
        cache_salt = self._cache_salt(new)
        for index in range(params.n):
            start = before.get(index, ResumedOutput(index, ()))
            if start.finish_reason is None:
                request.outputs.append(self._output(request, new, resolved, start, cache_salt))
        return request

    def _output(
        self,
        request: Request,
        new: EngineRequest,
        resolved: Resolved,
        start: ResumedOutput,
        cache_salt: bytes,
    ) -> Output:
        sequence = Sequence(
            new.request_id,
            new.prompt_token_ids,
            params_of_output(new.params, start.index),
            arrival_time=new.arrival_time,
            index=start.index,
            priority=new.priority,
            tenant=new.tenant,
            queued_at=request.times.queued_at,
            cache_salt=cache_salt,
            constraints=resolved.constraints,
        )
        text = Detokenizer(self._tokenizer, new.prompt_token_ids, new.params, resolved.end_texts)
        output = Output(sequence, text, request)
        output.resume(start.token_ids, self._rules)
        return output

    def _cache_salt(self, new: EngineRequest) -> bytes:
        """Without prefix caching, outputs of one request find each other's blocks and nobody else's."""
        if self._config.prefix_caching or new.params.n == 1:
            return new.cache_salt
        return f"{next(self._serials)} {new.request_id}".encode()


def _by_index(resumed: tuple[ResumedOutput, ...], n: int) -> dict[int, ResumedOutput]:
    """Raises `InvalidParameter` where they are no outputs of one request that is to go on."""
    by_index = {one.index: one for one in resumed}
    if len(by_index) < len(resumed) or not by_index.keys() <= set(range(n)):
        raise InvalidParameter("resumed", f"must name outputs 0 to {n - 1}, each at most once")
    if len(by_index) == n and all(one.finish_reason for one in resumed):
        raise InvalidParameter("resumed", "all outputs have ended; there is nothing to run")
    return by_index
