"""Is the process alive, would a task be worked on, and the numbers.

Law: liveness asks nobody. Readiness is what Redis says at this moment, and says why not.
"""

from dataclasses import dataclass
from http import HTTPStatus

import redis
from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag
from prometheus_client import CollectorRegistry

from api.problems import Problem
from api.redis_checks import RedisChecks
from api.redis_clients import is_unavailable, why_unavailable
from api.schemas.replies import PROBLEM_REPLY, Liveness, Readiness, WorkerView
from api.settings import ApiSettings
from monitoring.http import expose
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.store import server_state
from tokenmill.protocol.store.task_store import TaskStore

RETRY_SECONDS = 5
_TAG = Tag(name="Service", description="Health and metrics.")


@dataclass(frozen=True, slots=True)
class Redis:
    """Where tasks are stored, and what is known of how it is set up."""

    client: redis.Redis
    checks: RedisChecks


def health_routes(
    settings: ApiSettings, store: TaskStore, registry: CollectorRegistry, server: Redis
) -> APIBlueprint:
    routes = APIBlueprint("health", __name__, abp_tags=[_TAG], abp_responses={"default": PROBLEM_REPLY})

    @routes.get("/livez", summary="This process answers", responses={HTTPStatus.OK: Liveness})
    def livez() -> Response:
        return _json(Liveness())

    @routes.get("/readyz", summary="A worker is ready", responses={HTTPStatus.OK: Readiness})
    def readyz() -> Response:
        """503 while no worker is ready, or Redis refuses new tasks; `workers` then tells what they do, and
        how far they have loaded. `warnings`: what makes Redis lose accepted tasks.
        """
        workers, warnings = _workers(settings, store, server), server.checks.warnings
        if all(worker.state != "ready" for worker in workers):
            raise _not_ready(workers[0].state if workers else "no_worker", workers, warnings)
        return _json(
            Readiness(state="ready", model=settings.public_model, workers=workers, warnings=warnings)
        )

    @routes.get("/metrics", summary="Metrics in Prometheus' text format", responses={HTTPStatus.OK: _TEXT})
    def metrics() -> Response:
        body, content_type = expose(registry)
        return Response(body, content_type=content_type)

    return routes


_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def _workers(settings: ApiSettings, store: TaskStore, server: Redis) -> list[WorkerView]:
    try:
        records = store.workers()
        server_state.probe_write(server.client)
    except redis.RedisError as error:
        if not is_unavailable(error):
            raise
        if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
            raise _not_ready("no_redis", [], server.checks.warnings) from error
        detail = f"Redis refuses new tasks: {why_unavailable(error)}"
        raise _not_ready("redis_refuses", [], [detail, *server.checks.warnings]) from error
    return [_view(record) for record in records if record.slug == settings.slug]


def _view(record: WorkerRecord) -> WorkerView:
    return WorkerView(
        name=record.name,
        model=record.model,
        state=record.state,
        detail=record.detail,
        started_at=record.started_at,
        running=record.running,
        waiting=record.waiting,
        max_num_seqs=record.max_num_seqs,
    )


def _not_ready(state: str, workers: list[WorkerView], warnings: list[str]) -> Problem:
    details = {
        "no_redis": "Redis does not answer",
        "redis_refuses": warnings[0] if warnings else "",
        "no_worker": "no worker serves this model; tasks are accepted and wait",
    }
    detail = details.get(state, f"no worker is ready; one is {state}; tasks are accepted and wait")
    shown = [worker.model_dump() for worker in workers]
    members = {"state": state, "workers": shown, "warnings": warnings}
    return Problem(503, "not_ready", detail, retry_after=RETRY_SECONDS, members=members)


def _json(body: Liveness | Readiness) -> Response:
    return Response(body.model_dump_json(), content_type="application/json")
