"""Prepares a claimed task for the engine: token ids, parameters, limits, and results of earlier attempts.

A prompt is rendered and tokenized only in the first attempt.
"""

import json
import zlib
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
from tokenmill.protocol.messages import JOB_FUNCTION, GenerateRequest, LogEntry, ProtocolError
from tokenmill.protocol.records import Claimed
from worker.errors import RequestRefused, invalid_request, invalid_value, server_error
from worker.inbox import PreparedTask
from worker.ownership import Ownership
from worker.request_fields import (
    PromptTokenizer,
    prompt_field,
    to_deadlines,
    to_sampling_params,
    to_token_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of this worker.

    `fingerprint` identifies the checkpoint: token ids of another one cannot be reused. `default_sampling`:
    fields of `SamplingParams` for requests that do not set them. `max_sequence_tokens`: maximum of prompt and
    output tokens together; None: unknown.
    """

    name: str
    slug: str
    fingerprint: str
    tokenizer: PromptTokenizer
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_sequence_tokens: int | None = None


class Preparation:
    """Prepares tasks of `model`."""

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
        with suppress(InvalidParameter):  # `Engine.add` raises it again.
            prepare_texts(self._model.tokenizer, params)
        return PreparedTask(
            ownership_of(task),
            _to_engine_request(task, job, prompt_token_ids, params),
            prompt_field=prompt_field(job),
            output_limit=limit,
            sampling_defaults=json.dumps(dict(defaults)),
        )

    def _defaults(self, task: Claimed) -> Mapping[str, Any]:
        """Sampling defaults of the first attempt, which may have had another worker."""
        if task.prompt_token_ids is None:
            return self._model.default_sampling
        stored: dict[str, Any] = json.loads(task.sampling_defaults or "{}")
        return stored

    def _output_limit(self, sampling: object, params: SamplingParams, num_prompt_tokens: int) -> OutputLimit:
        requested = sampling.get("max_tokens") if isinstance(sampling, Mapping) else None
        maximum = self._model.max_sequence_tokens
        return output_limit(
            requested=requested,
            default=params.max_tokens if requested is None else None,
            room=None if maximum is None else maximum - num_prompt_tokens,
            n=params.n,
            logprobs=params.logprobs,
        )

    def _prompt_token_ids(self, task: Claimed, job: GenerateRequest) -> list[int]:
        """Those of the first attempt, if any: a template may insert the date, and the prompt must stay."""
        if task.prompt_token_ids is None:
            return to_token_ids(job, self._model.tokenizer)
        if task.fingerprint != self._model.fingerprint:
            raise RequestRefused(
                server_error(
                    "model_changed",
                    "the model behind this name changed after the request was started; send it again",
                )
            )
        return list(task.prompt_token_ids)


def read_job(data: bytes) -> GenerateRequest:
    """The request in the `data` of an RQ job: zlib of JSON `[function, null, [payload], {}]`.

    The function that a job names is only compared, never imported or called. Raises `RequestRefused` for
    anything else.
    """
    function, payload = _read_call(data)
    if function != JOB_FUNCTION:
        raise RequestRefused(
            invalid_request(
                "unknown_function",
                f"this queue accepts only jobs of {JOB_FUNCTION}, not {function!r}; nothing was called",
            )
        )
    try:
        return GenerateRequest.from_payload(payload)
    except ProtocolError as error:
        raise RequestRefused(invalid_request("unreadable_request", str(error))) from error


def _read_call(data: bytes) -> tuple[object, object]:
    try:
        # RQ also accepts data that is not compressed.
        plain = zlib.decompress(data) if data[:1] == b"\x78" else data
        function, _, args, _ = json.loads(plain)
        return function, args[0] if isinstance(args, list) and len(args) == 1 else None
    except (ValueError, TypeError, zlib.error) as error:
        raise RequestRefused(
            invalid_request(
                "unreadable_request", "the job's data is not a JSON call; see rq.serializers.JSONSerializer"
            )
        ) from error


def ownership_of(task: Claimed) -> Ownership:
    return Ownership(task.task_id, task.owner)


def with_defaults(sampling: object, defaults: Mapping[str, Any]) -> object:
    """The request's sampling fields, completed by the model's defaults. A null counts as not set."""
    if not isinstance(sampling, Mapping) or not defaults:
        return sampling
    requested = {name: value for name, value in sampling.items() if value is not None or name not in defaults}
    merged = {**defaults, **requested}
    min_tokens = requested.get("min_tokens")
    if "max_tokens" not in requested and "max_tokens" in merged and type(min_tokens) is int:
        # A default must not make a valid request invalid.
        merged["max_tokens"] = max(merged["max_tokens"], min_tokens)
    return merged


def _to_engine_request(
    task: Claimed, job: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams
) -> EngineRequest:
    resumed = tuple(_resumed(task.entries))
    return EngineRequest(
        ownership_of(task).request_id,
        prompt_token_ids,
        params,
        arrival_time=task.accepted_at,
        priority=task.priority,
        cache_salt=scoped_salt(naming.tenant_of(task.queue), job.cache_salt),
        deadlines=_remaining(to_deadlines(job), task, resumed),
        resumed=resumed,
        waited_seconds=task.waited_seconds,
    )


def _check_size(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Checks what depends on the number of prompt tokens, which the API does not know.

    Raises `RequestRefused`.
    """
    if not prompt_logprobs_fit(num_prompt_tokens, params.prompt_logprobs):
        message = f"prompt_logprobs: {prompt_logprobs_error(num_prompt_tokens)}"
        raise RequestRefused(invalid_value("prompt_logprobs", message))


def scoped_salt(tenant: str, cache_salt: str | None) -> bytes:
    """Makes a salt the tenant's own, so that no tenant can find out whether another sent a prompt before."""
    return f"{tenant}\0{cache_salt or ''}".encode()


def _resumed(entries: tuple[LogEntry, ...]) -> Iterator[ResumedOutput]:
    """The outputs that earlier attempts published, as far as they have begun."""
    for output in outputs_of(entries):
        reason = FinishReason(output.finish_reason) if output.finish_reason else None
        if output.token_ids or reason:
            yield ResumedOutput(output.index, tuple(output.token_ids), reason)


def _remaining(deadlines: Deadlines, task: Claimed, resumed: tuple[ResumedOutput, ...]) -> Deadlines:
    """Without the deadlines that an earlier attempt has met."""
    has_token = any(output.token_ids for output in resumed)
    return Deadlines(
        queue_timeout_seconds=None if task.has_started else deadlines.queue_timeout_seconds,
        ttft_timeout_seconds=None if has_token else deadlines.ttft_timeout_seconds,
        timeout_seconds=deadlines.timeout_seconds,
    )
