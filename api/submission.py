"""Turns a checked body into a request for the worker, an RQ job, and one atomic submission to Redis.

A refused submission leaves nothing in Redis.
"""

import hashlib
import json
import re
import secrets
from dataclasses import replace
from typing import Any

import redis
from flask import has_request_context
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from api.call_log import note_task
from api.problems import Problem, bad_field, request_id
from api.schemas.requests import Message, TaskBody
from tokenmill.protocol import naming
from tokenmill.protocol.limits import TIME_LIMIT_NAMES, TimeLimits
from tokenmill.protocol.messages import JOB_FUNCTION, GenerateRequest
from tokenmill.protocol.records import IdempotencyConflict, ModelCard, QueueFull, Submission, Submitted
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

BYTES_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 256
"""Estimated length of an output without `max_tokens`."""
MAX_COST = 2**17
"""Largest estimate before a worker has published the length of its model."""
QUEUE_FULL_SECONDS = 10
"""Retry-After of a full queue whose rate is unknown."""
MAX_KEY_CHARACTERS = 255
RQ_NO_TIMEOUT = -1
"""Tasks have their own time limits."""
_KEY = re.compile(r"[\x20-\x7e]+")


class Submitter:
    """Submits tasks for the one model of this service."""

    def __init__(self, settings: ApiSettings, client: redis.Redis, store: TaskStore) -> None:
        self._settings = settings
        self._client = client
        self._store = store

    def submit(
        self, body: TaskBody, idempotency_key: str | None, tenant: str, card: ModelCard | None
    ) -> Submitted:
        """Queue a task of `tenant`. Raises `Problem`: 422 for a reused key, 429 for a full queue."""
        return self._submit(self._submission(body, idempotency_key, tenant, card))

    def submit_in_background(
        self, body: TaskBody, task_id: str, tenant: str, card: ModelCard | None
    ) -> Submitted:
        """Queue a task under an id that the caller has chosen; if there is one with that id, it is returned.

        Half of the queue is left to other tasks. Raises `Problem`: 429 for a full queue.
        """
        submission = replace(
            self._submission(body, None, tenant, card, task_id),
            max_waiting=_half(self._settings.waiting_limit),
            max_waiting_tokens=_half(self._settings.waiting_token_limit),
        )
        return self._submit(submission)

    def _submit(self, submission: Submission) -> Submitted:
        try:
            submitted = self._store.submit(submission)
        except QueueFull as full:
            raise self._queue_full(full, submission.cost) from full
        except IdempotencyConflict:
            detail = "this Idempotency-Key was used with another body; use a new key"
            raise Problem(422, "idempotency_key_reused", detail, param="Idempotency-Key") from None
        if has_request_context():
            note_task(submitted.task_id)
        return submitted

    def _submission(
        self, body: TaskBody, key: str | None, tenant: str, card: ModelCard | None, task_id: str = ""
    ) -> Submission:
        settings = self._settings
        request = to_request(body, task_id or naming.new_task_id(), settings.public_model)
        queue = naming.queue_name(settings.slug, request.priority, tenant)
        return Submission(
            task_id=request.id,
            queue=queue,
            slug=settings.slug,
            model=request.model,
            priority=request.priority,
            tenant=tenant,
            job_fields=self._job_fields(request, queue),
            cost=estimate_cost(body, card),
            metadata=json.dumps(body.metadata, ensure_ascii=False),
            idempotency_key=key,
            body_digest=body_digest(body),
            max_waiting=settings.waiting_limit,
            max_waiting_tokens=settings.waiting_token_limit,
            share_limits=settings.keyring.has_several_tenants,
            num_outputs=body.sampling_params.n,
            webhook=body.webhook.url if body.webhook else "",
            request_id=request_id() if has_request_context() else "",
            cancel_on_disconnect=body.on_disconnect == "cancel",
            limits=TimeLimits(**{name: getattr(body, name) for name in TIME_LIMIT_NAMES}),
        )

    def _job_fields(self, request: GenerateRequest, queue: str) -> dict[str, Any]:
        """The fields that RQ itself would write, so that RQ's tools show the task."""
        lifetime = round(self._settings.retention_seconds)
        job = Job.create(
            JOB_FUNCTION,
            args=(request.to_payload(),),
            connection=self._client,
            serializer=JSONSerializer,
            id=request.id,
            origin=queue,
            status=JobStatus.QUEUED,
            # RQ's default description would repeat the prompt in logs and dashboards.
            description="generate",
            timeout=RQ_NO_TIMEOUT,
            result_ttl=lifetime,
            failure_ttl=lifetime,
        )
        job.enqueued_at = now()
        return job.to_dict()

    def _queue_full(self, full: QueueFull, cost: int) -> Problem:
        limits = {"tasks": self._settings.max_waiting_tasks, "tokens": self._settings.max_waiting_tokens}
        return Problem(
            429,
            "queue_full",
            _queue_full_detail(full, cost, limits[full.limit_met]),
            retry_after=self._seconds_until_room(full, cost, limits["tokens"]),
            members={
                "limit_met": full.limit_met,
                "limit_of": full.limit_of,
                "depth": full.depth,
                "limit": limits["tasks"] or None,
                "waiting_tokens": full.tokens,
                "token_limit": limits["tokens"] or None,
                "tenant_depth": full.tenant_depth,
                "tenant_waiting_tokens": full.tenant_tokens,
            },
        )

    def _seconds_until_room(self, full: QueueFull, cost: int, token_limit: int) -> float:
        """Estimate from the rate of the last minute: the time of one average task where the limit on tasks is
        met, and of the excess tokens where the limit on tokens is.
        """
        drain_rate = self._store.queue_stats(self._settings.slug).drain_rate
        if not drain_rate:
            return QUEUE_FULL_SECONDS
        if full.limit_met == "tasks":
            return full.tokens / max(full.depth, 1) / drain_rate
        # A task that is larger than the limit is accepted when the queue is empty.
        return min(full.tokens, full.tokens + cost - token_limit) / drain_rate


def _half(limit: int | None) -> int | None:
    return None if limit is None else max(1, limit // 2)


def _queue_full_detail(full: QueueFull, cost: int, limit: int) -> str:
    by_tasks = full.limit_met == "tasks"
    waiting, own = (full.depth, full.tenant_depth) if by_tasks else (full.tokens, full.tenant_tokens)
    unit = "tasks" if by_tasks else "estimated tokens"
    added = "" if by_tasks else f", and this task would add {cost}"
    if full.limit_of == "all":
        return (
            f"the queue is full: {waiting} {unit} are waiting{added}; the limit is {limit}; try again later"
        )
    return (
        f"the queue is full for this tenant: {own} {unit} of this tenant wait{added}; a tenant may have as "
        f"many as are free, which is {max(0, limit - waiting)} of {limit}; try again later"
    )


def to_request(body: TaskBody, task_id: str, model: str) -> GenerateRequest:
    """The request for the worker: the values of the body, a seed, and no defaults."""
    return GenerateRequest(
        id=task_id,
        model=model,
        prompt=body.prompt,
        messages=_dumped(body.messages),
        prompt_token_ids=None if body.prompt_token_ids is None else tuple(body.prompt_token_ids),
        sampling={"seed": secrets.randbits(63), **body.sampling},
        priority=naming.DEFAULT_PRIORITY if body.priority is None else body.priority,
        cache_salt=body.cache_salt,
        **body.chat_fields,
        **{name: getattr(body, name) for name in TIME_LIMIT_NAMES},
    )


def _dumped(messages: list[Message] | None) -> tuple[dict[str, Any], ...] | None:
    return None if messages is None else tuple(turn.model_dump(exclude_none=True) for turn in messages)


def body_digest(body: TaskBody) -> str:
    """Digest of the values of a body, independent of formatting, field order and null fields. Defaults are
    not filled in.
    """
    values = body.model_dump(exclude_none=True)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def estimate_cost(body: TaskBody, card: ModelCard | None) -> int:
    """Tokens of the prompt and of all outputs, estimated without a tokenizer. Outputs share the prompt."""
    if body.prompt_token_ids is not None:
        prompt = len(body.prompt_token_ids)
    else:
        text = body.prompt or "".join(turn.content for turn in body.messages or ())
        if body.chat_fields:
            text += json.dumps(body.chat_fields)
        prompt = len(text.encode()) // BYTES_PER_TOKEN + 1
    maximum = card.max_model_len if card else MAX_COST
    prompt = min(prompt, maximum)
    output = min(body.sampling_params.max_tokens or DEFAULT_OUTPUT_TOKENS, maximum - prompt)
    return prompt + body.sampling_params.n * output


def parse_idempotency_key(header: str | None) -> str | None:
    """An Idempotency-Key, quoted as the IETF draft has it or bare. Raises `Problem` (400)."""
    if header is None:
        return None
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if len(key) > MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
        raise bad_field("Idempotency-Key", f"must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters")
    return key
