"""A validated body becomes a request, the request an RQ job, the job one atomic submission.

Law: nothing is left in Redis of a submission that was refused. Imports of RQ only what forms a job.
"""

import hashlib
import json
import re
import secrets
from typing import Any

import redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from api.admission import check_card, check_model, check_webhook
from api.problems import Problem, bad_field
from api.schemas.requests import TaskBody
from api.schemas.sampling import SAMPLING_FIELDS
from api.settings import ApiSettings
from tokenmill.protocol import naming
from tokenmill.protocol.limits import TIME_LIMIT_NAMES, TimeLimits
from tokenmill.protocol.messages import JOB_FUNCTION, GenerateRequest
from tokenmill.protocol.records import IdempotencyConflict, ModelCard, QueueFull, Submission, Submitted
from tokenmill.protocol.store.task_store import TaskStore

BYTES_PER_TOKEN = 4
OUTPUT_GUESS = 256
"""Tokens that a task is taken to need where it names no `max_tokens`."""
COST_CEILING = 2**17
"""The most that a task is taken to need before a worker told its model's length."""
QUEUE_FULL_SECONDS = 10
"""Retry-After of a full queue whose rate nobody knows."""
MAX_KEY_CHARACTERS = 255
NO_TIMEOUT = -1
"""RQ's word for it: how long a task may run is not RQ's to decide."""
_KEY = re.compile(r"[\x20-\x7e]+")


class Submitter:
    """Takes tasks for the one model of this service."""

    def __init__(self, settings: ApiSettings, client: redis.Redis, store: TaskStore) -> None:
        self._settings = settings
        self._client = client
        self._store = store

    def submit(self, body: TaskBody, idempotency_key: str | None, tenant: str) -> Submitted:
        """Queue a task of `tenant`. Raises `Problem`: 400, 404, 422 or 429."""
        key = None if idempotency_key is None else parse_key(idempotency_key)
        check_model(body, self._settings.public_model)
        check_webhook(body, self._settings)
        card = self._store.model_card(self._settings.slug)
        if card is not None:
            check_card(body, card)
        submission = self._submission(body, key, card, tenant)
        try:
            return self._store.submit(submission)
        except QueueFull as full:
            raise self._queue_full(full, submission.cost) from full
        except IdempotencyConflict:
            detail = "this Idempotency-Key was used with another body; take a new key"
            raise Problem(422, "idempotency_key_reused", detail, param="Idempotency-Key") from None

    def _submission(self, body: TaskBody, key: str | None, card: ModelCard | None, tenant: str) -> Submission:
        settings = self._settings
        request = to_request(body, naming.new_task_id(), settings.public_model)
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
            num_outputs=body.n or 1,
            webhook=body.webhook.url if body.webhook else "",
            cancel_on_disconnect=body.on_disconnect == "cancel",
            limits=TimeLimits(**{name: getattr(body, name) for name in TIME_LIMIT_NAMES}),
        )

    def _job_fields(self, request: GenerateRequest, queue: str) -> dict[str, Any]:
        """What RQ would write, so that its tools show the task."""
        lifetime = round(self._settings.retention_seconds)
        job = Job.create(
            JOB_FUNCTION,
            args=(request.to_payload(),),
            connection=self._client,
            serializer=JSONSerializer,
            id=request.id,
            origin=queue,
            status=JobStatus.QUEUED,
            # RQ's own description would repeat the prompt in logs and dashboards.
            description="generate",
            timeout=NO_TIMEOUT,
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
            _full_detail(full, cost, limits[full.limit_met]),
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
        """As the last minute went. One task's share of the waiting work is done, and there is room for one;
        of tokens all that are too many must go.
        """
        drain_rate = self._store.queue_stats(self._settings.slug).drain_rate
        if not drain_rate:
            return QUEUE_FULL_SECONDS
        if full.limit_met == "tasks":
            return full.tokens / max(full.depth, 1) / drain_rate
        # What is larger than the limit is taken when nothing else waits.
        return min(full.tokens, full.tokens + cost - token_limit) / drain_rate


def _full_detail(full: QueueFull, cost: int, limit: int) -> str:
    by_tasks = full.limit_met == "tasks"
    waiting, own = (full.depth, full.tenant_depth) if by_tasks else (full.tokens, full.tenant_tokens)
    what = "tasks" if by_tasks else "estimated tokens"
    more = "" if by_tasks else f", and this task would add {cost}"
    if full.limit_of == "all":
        return f"{waiting} {what} wait already{more}; the limit is {limit}; try again later"
    return (
        f"{own} {what} of this tenant wait already{more}; a tenant may have as many as are free, "
        f"and of {limit} {max(0, limit - waiting)} are; try again later"
    )


def to_request(body: TaskBody, task_id: str, model: str) -> GenerateRequest:
    """What the worker gets: the body's own values, a seed, and no defaults."""
    sampling = body.model_dump(include=set(SAMPLING_FIELDS), exclude_none=True, by_alias=True)
    sampling.setdefault("seed", secrets.randbits(63))
    return GenerateRequest(
        id=task_id,
        model=model,
        prompt=body.prompt,
        messages=None if body.messages is None else tuple(turn.model_dump() for turn in body.messages),
        prompt_token_ids=None if body.prompt_token_ids is None else tuple(body.prompt_token_ids),
        sampling=sampling,
        priority=naming.DEFAULT_PRIORITY if body.priority is None else body.priority,
        cache_salt=body.cache_salt,
        **{name: getattr(body, name) for name in TIME_LIMIT_NAMES},
    )


def body_digest(body: TaskBody) -> str:
    """Tells bodies apart by what they say, not by spelling, order or null fields; before any default."""
    values = body.model_dump(exclude_none=True)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def estimate_cost(body: TaskBody, card: ModelCard | None) -> int:
    """Prompt and outputs in tokens, as far as they can be told without a tokenizer. They share the prompt."""
    if body.prompt_token_ids is not None:
        prompt = len(body.prompt_token_ids)
    else:
        text = body.prompt or "".join(turn.content for turn in body.messages or ())
        prompt = len(text.encode()) // BYTES_PER_TOKEN + 1
    ceiling = card.max_model_len if card else COST_CEILING
    prompt = min(prompt, ceiling)
    output = min(body.max_tokens or OUTPUT_GUESS, ceiling - prompt)
    return prompt + (body.n or 1) * output


def parse_key(header: str) -> str:
    """An Idempotency-Key, quoted as the draft standard has it or bare. Raises `Problem` (400)."""
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if len(key) > MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
        raise bad_field("Idempotency-Key", f"must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters")
    return key
