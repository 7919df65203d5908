"""A claimed task becomes an arrival: token ids, parameters, limits, and what earlier attempts have done.

Law: raises `RequestRefused`, or gives what the engine takes. Renders and tokenizes a prompt once in its life.
Knows neither Redis nor threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.requests import Deadlines, ResumedOutput
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from worker.errors import RequestRefused, invalid_value, server_error
from worker.inbox import Arrival
from worker.jobs import read_job
from worker.ownership import Ownership
from worker.prompts import Tokenizer, prompt_field, to_deadlines, to_sampling_params, to_token_ids
from worker.protocol import naming
from worker.protocol.messages import GenerateRequest, LogEntry
from worker.protocol.outputs import outputs_of
from worker.protocol.records import Claimed
from worker.protocol.sizes import MAX_TOLD, num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a worker serves. `fingerprint` tells checkpoints apart whose token ids must not be mixed."""

    name: str
    slug: str
    fingerprint: str
    tokenizer: Tokenizer


class Preparation:
    """Makes arrivals of tasks of `model`."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def arrival(self, task: Claimed) -> Arrival:
        """Raises `RequestRefused`."""
        request = read_job(task.data)
        params = to_sampling_params(request.sampling)
        if params.n != task.num_outputs:
            raise RequestRefused(invalid_value("n", f"n: was {task.num_outputs} when the task was accepted"))
        prompt_token_ids = self._prompt_token_ids(task, request)
        _check_size(params, len(prompt_token_ids))
        resumed = tuple(_resumed(task.entries))
        tenant = naming.tenant_of(task.queue)
        return Arrival(
            ownership=ownership_of(task),
            prompt_token_ids=prompt_token_ids,
            params=params,
            accepted_at=task.accepted_at,
            prompt_field=prompt_field(request),
            priority=task.priority,
            tenant=tenant,
            cache_salt=scoped_salt(tenant, request.cache_salt),
            deadlines=_left(to_deadlines(request), task, resumed),
            resumed=resumed,
            waited_seconds=task.waited_seconds,
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


def _check_size(params: SamplingParams, num_prompt_tokens: int) -> None:
    """What the API could not know. Raises `RequestRefused`."""
    if num_told(params.n * (params.max_tokens or 1), params.logprobs) > MAX_TOLD:
        raise RequestRefused(invalid_value("max_tokens", f"max_tokens: more than {MAX_TOLD} numbers to tell"))
    if params.prompt_logprobs is not None and num_told(num_prompt_tokens, params.prompt_logprobs) > MAX_TOLD:
        message = f"prompt_logprobs: of {num_prompt_tokens} tokens are more than {MAX_TOLD} numbers"
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
