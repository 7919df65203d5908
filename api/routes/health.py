"""The routes `/livez`, `/readyz`, `/health` and `/metrics`.

Liveness depends on this process alone. Readiness asks Redis at each call, and says why the service is not
ready.
"""

from dataclasses import dataclass
from http import HTTPStatus

import redis
from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag
from prometheus_client import CollectorRegistry

from api.background.redis_checks import RedisChecks
from api.problems import Problem
from api.redis_clients import is_unavailable, why_unavailable
from api.schemas.replies import PROBLEM_REPLY, Liveness, Readiness, WorkerView
from api.schemas.worker_view import worker_view
from monitoring.http import expose
from tokenmill.protocol.store import server_state
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

RETRY_SECONDS = 5
_TAG = Tag(name="Service", description="Health and metrics.")
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


@dataclass(frozen=True, slots=True)
class Redis:
    """The Redis server of this service, and the checks of its configuration."""

    client: redis.Redis
    checks: RedisChecks


def health_routes(
    settings: ApiSettings, store: TaskStore, registry: CollectorRegistry, server: Redis
) -> APIBlueprint:
    routes = APIBlueprint("health", __name__, abp_tags=[_TAG], abp_responses={"default": PROBLEM_REPLY})

    @routes.get("/livez", summary="Liveness", responses={HTTPStatus.OK: Liveness})
    def livez() -> Response:
        """200 while this process answers."""
        return _json(Liveness())

    @routes.get("/readyz", summary="Readiness", responses={HTTPStatus.OK: Readiness})
    def readyz() -> Response:
        """200 if a worker is ready. 503 otherwise, or if Redis refuses new tasks.

        `workers`: the state of each, and how far it has loaded. `warnings`: settings of Redis that may lose
        accepted tasks.
        """
        return _json(_readiness(settings, store, server))

    @routes.get("/health", summary="Health", responses={HTTPStatus.OK: Readiness})
    def health() -> Response:
        """The same as `/readyz`, under the path that load generators and other servers use."""
        return _json(_readiness(settings, store, server))

    @routes.get("/metrics", summary="Metrics", responses={HTTPStatus.OK: _TEXT})
    def metrics() -> Response:
        """Of this API process and of the queue, in Prometheus' text format."""
        body, content_type = expose(registry)
        return Response(body, content_type=content_type)

    return routes


def _readiness(settings: ApiSettings, store: TaskStore, server: Redis) -> Readiness:
    """Raises `Problem` (503) if no worker is ready."""
    workers, warnings = _workers(settings, store, server), server.checks.warnings
    if all(worker.state != "ready" for worker in workers):
        raise _not_ready(workers[0].state if workers else "no_worker", workers, warnings)
    return Readiness(state="ready", model=settings.public_model, workers=workers, warnings=warnings)


def _workers(settings: ApiSettings, store: TaskStore, server: Redis) -> list[WorkerView]:
    """The workers of this service's model. Raises `Problem` (503) if Redis is unavailable."""
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
    return [worker_view(record) for record in records if record.slug == settings.slug]


def _not_ready(state: str, workers: list[WorkerView], warnings: list[str]) -> Problem:
    details = {
        "no_redis": "Redis does not answer",
        "redis_refuses": warnings[0] if warnings else "",
        "no_worker": "no worker is running for this model; tasks are accepted and wait",
    }
    detail = details.get(state, f"no worker is ready; one is {state}; tasks are accepted and wait")
    members = {
        "state": state,
        "workers": [worker.model_dump() for worker in workers],
        "warnings": warnings,
    }
    return Problem(503, "not_ready", detail, retry_after=RETRY_SECONDS, members=members)


def _json(body: Liveness | Readiness) -> Response:
    return Response(body.model_dump_json(), content_type="application/json")
