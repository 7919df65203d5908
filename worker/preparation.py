"""A claimed task becomes an arrival: token ids, parameters, limits, and what earlier attempts have done.

Law: raises `RequestRefused`, or gives what the engine takes. Renders and tokenizes a prompt once in its life.
Knows neither Redis nor threads.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import InvalidParameter
from engine.outputs import ResumedOutput
from engine.requests.deadlines import Deadlines
from engine.requests.engine_request import EngineRequest
from engine.requests.input_processor import prepare_texts
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from tokenmill.protocol import naming
from tokenmill.protocol.limits import OutputLimit, output_limit, prompt_logprobs_error, prompt_logprobs_fit
from tokenmill.protocol.log import outputs_of
from tokenmill.protocol.messages import GenerateRequest, LogEntry
from tokenmill.protocol.records import Claimed
from worker.errors import RequestRefused, invalid_value, server_error
from worker.inbox import PreparedTask
from worker.jobs import read_job
from worker.ownership import Ownership
from worker.prompts import Tokenizer, prompt_field, to_deadlines, to_sampling_params, to_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a worker serves. `fingerprint` tells checkpoints apart whose token ids must not be mixed.

    `default_sampling`: fields of `SamplingParams` that hold where a request does not give them.
    `max_sequence_tokens`: the most tokens of prompt and output together; None: not known.
    """

    name: str
    slug: str
    fingerprint: str
    tokenizer: Tokenizer
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_sequence_tokens: int | None = None


class Preparation:
    """Makes arrivals of tasks of `model`."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def prepare(self, task: Claimed) -> PreparedTask:
        """Raises `RequestRefused`."""
        job = read_job(task.data)
        defaults = self._defaults(task)
        params = to_sampling_params(with_defaults(job.sampling, defaults))
        if params.n != task.num_outputs:
            raise RequestRefused(invalid_value("n", f"n: was {task.num_outputs} when the task was accepted"))
        prompt_token_ids = self._prompt_token_ids(task, job)
        _check_size(params, len(prompt_token_ids))
        limit = self._output_limit(job.sampling, params, len(prompt_token_ids))
        params = replace(
            params, max_tokens=limit.max_tokens, min_tokens=min(params.min_tokens, limit.max_tokens)
        )
        with suppress(InvalidParameter):  # the engine says what is wrong
            prepare_texts(self._model.tokenizer, params)
        ownership = ownership_of(task)
        resumed = tuple(_resumed(task.entries))
        tenant = naming.tenant_of(task.queue)
        request = EngineRequest(
            ownership.request_id,
            prompt_token_ids,
            params,
            arrival_time=task.accepted_at,
            priority=task.priority,
            tenant=tenant,
            cache_salt=scoped_salt(tenant, job.cache_salt),
            deadlines=_left(to_deadlines(job), task, resumed),
            resumed=resumed,
            waited_seconds=task.waited_seconds,
        )
        return PreparedTask(
            ownership,
            request,
            prompt_field=prompt_field(job),
            output_limit=limit,
            sampling_defaults=json.dumps(dict(defaults)),
        )

    def _defaults(self, task: Claimed) -> Mapping[str, Any]:
        """Those of the first attempt, also where this worker has others."""
        if task.prompt_token_ids is None:
            return self._model.default_sampling
        stored: dict[str, Any] = json.loads(task.sampling_defaults or "{}")
        return stored

    def _output_limit(self, sampling: object, params: SamplingParams, num_prompt_tokens: int) -> OutputLimit:
        requested = sampling.get("max_tokens") if isinstance(sampling, Mapping) else None
        most = self._model.max_sequence_tokens
        return output_limit(
            requested=requested,
            default=params.max_tokens if requested is None else None,
            room=None if most is None else most - num_prompt_tokens,
            n=params.n,
            logprobs=params.logprobs,
        )

    def _prompt_token_ids(self, task: Claimed, request: GenerateRequest) -> list[int]:
        """Those of the first attempt, so that a template which tells the date gives one prompt."""
        if task.prompt_token_ids is None:
            return to_token_ids(request, self._model.tokenizer)
        if task.fingerprint != self._model.fingerprint:
            raise RequestRefused(
                server_error(
                    "model_changed",
                    "the model behind this name changed after the request had begun; send it again",
                )
            )
        return list(task.prompt_token_ids)


def ownership_of(task: Claimed) -> Ownership:
    return Ownership(task.task_id, task.owner)


def with_defaults(sampling: object, defaults: Mapping[str, Any]) -> object:
    """What a request gives, and the model's defaults for the rest. Null is not given."""
    if not isinstance(sampling, Mapping) or not defaults:
        return sampling
    given = {name: value for name, value in sampling.items() if value is not None or name not in defaults}
    merged = {**defaults, **given}
    least = given.get("min_tokens")
    if "max_tokens" not in given and "max_tokens" in merged and type(least) is int:
        # A default does not make a request wrong.
        merged["max_tokens"] = max(merged["max_tokens"], least)
    return merged


def _check_size(params: SamplingParams, num_prompt_tokens: int) -> None:
    """What the API could not know. Raises `RequestRefused`."""
    if not prompt_logprobs_fit(num_prompt_tokens, params.prompt_logprobs):
        message = f"prompt_logprobs: {prompt_logprobs_error(num_prompt_tokens)}"
        raise RequestRefused(invalid_value("prompt_logprobs", message))


def scoped_salt(tenant: str, cache_salt: str | None) -> bytes:
    """One salt of two tenants is two: whether a prompt was seen before is told to its own tenant only."""
    return f"{tenant}\0{cache_salt or ''}".encode()


def _resumed(entries: tuple[LogEntry, ...]) -> Iterator[ResumedOutput]:
    """What earlier attempts published of each output that has begun."""
    for output in outputs_of(entries):
        reason = FinishReason(output.finish_reason) if output.finish_reason else None
        if output.token_ids or reason:
            yield ResumedOutput(output.index, tuple(output.token_ids), reason)


def _left(given: Deadlines, task: Claimed, resumed: tuple[ResumedOutput, ...]) -> Deadlines:
    """Without those that an earlier attempt has kept."""
    has_token = any(output.token_ids for output in resumed)
    return Deadlines(
        queue_seconds=None if task.has_started else given.queue_seconds,
        ttft_seconds=None if has_token else given.ttft_seconds,
        total_seconds=given.total_seconds,
    )
