"""Makes the outputs of a request from what was asked: checked, resolved to token ids, and resumed.

Law: what cannot be served is refused here, before anything is changed. Knows no scheduler.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer, Tokenizer
from engine.errors import InvalidParameter
from engine.request_group import Output, Request, RequestTimes
from engine.requests import ResumedOutput
from engine.resolving import Resolver, params_of_output
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.stopping import StopRules


class RequestMaker:
    """`rules` are those that live tokens will be held to."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        resolver: Resolver,
        rules: StopRules,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._resolver = resolver
        self._rules = rules
        self._clock = clock
        self._serials = itertools.count()

    def make(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float,
        priority: int,
        tenant: str,
        cache_salt: bytes,
        resumed: tuple[ResumedOutput, ...],
        waited_seconds: float,
    ) -> Request:
        """See `Engine.add`. Raises `InvalidParameter`, or what the tokenizer raises."""
        self._resolver.check(prompt_token_ids, params)
        resolved = self._resolver.resolve(params)
        before = _by_index(resumed, params.n)
        request = Request(
            request_id,
            params,
            RequestTimes(self._clock() - waited_seconds, any(one.token_ids for one in resumed)),
            ended_before=tuple(one for one in resumed if one.finish_reason),
        )
        # The first token of all told those of the prompt.
        if params.prompt_logprobs is not None and not request.times.resumed:
            request.prompt_logprobs = [None]
        plain = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        if params.n > 1 and not self._config.prefix_caching:
            # The outputs find each other's blocks, and nobody else's.
            cache_salt = f"{next(self._serials)}:{request_id}".encode()
        for index in range(params.n):
            if (one := before.get(index)) and one.finish_reason:
                continue
            sequence = Sequence(
                request_id,
                prompt_token_ids,
                params_of_output(plain, index),
                arrival=arrival,
                index=index,
                priority=priority,
                tenant=tenant,
                accepted=request.times.accepted,
                cache_salt=cache_salt,
                constraints=resolved.constraints,
            )
            text = Detokenizer(self._tokenizer, prompt_token_ids, params, resolved.end_texts)
            output = Output(sequence, text, request)
            output.resume(one.token_ids if one else (), self._rules)
            request.outputs.append(output)
        return request


def _by_index(resumed: tuple[ResumedOutput, ...], n: int) -> dict[int, ResumedOutput]:
    """Raises `InvalidParameter` where they are no outputs of one request that is to go on."""
    by_index = {one.index: one for one in resumed}
    if len(by_index) < len(resumed) or not by_index.keys() <= set(range(n)):
        raise InvalidParameter("resumed", f"must name outputs 0 to {n - 1}, each at most once")
    if len(by_index) == n and all(one.finish_reason for one in resumed):
        raise InvalidParameter("resumed", "all outputs have ended; there is nothing to run")
    return by_index
