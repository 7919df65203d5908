"""The routes `/v1/queue` and `/v1/workers`: why a task waits, and for whom."""

from http import HTTPStatus

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag

from api.authentication import SCHEME_NAME
from api.routes.task_services import TaskServices
from api.schemas.replies import PROBLEM_REPLY, Queue, WorkerList
from api.schemas.worker_view import worker_view
from tokenmill.protocol.snapshots import QueueStats

_TAG = Tag(name="Queue", description="What waits, and which workers run.")


def service_state_routes(services: TaskServices) -> APIBlueprint:
    settings, store = services.settings, services.store
    routes = APIBlueprint(
        "service_state",
        __name__,
        url_prefix="/v1",
        abp_tags=[_TAG],
        abp_security=[{SCHEME_NAME: []}] if settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.get("/queue", summary="Get the queue", responses={HTTPStatus.OK: Queue})
    def queue() -> Response:
        """Numbers of tasks and estimated tokens, over all tenants."""
        body = _queue(store.queue_stats(settings.slug), settings.public_model)
        return Response(body.model_dump_json(), content_type="application/json")

    @routes.get("/workers", summary="List the workers", responses={HTTPStatus.OK: WorkerList})
    def workers() -> Response:
        """Each worker with its state, and while it loads, its progress."""
        records = [record for record in store.workers() if record.slug == settings.slug]
        body = WorkerList(data=[worker_view(record) for record in records])
        return Response(body.model_dump_json(), content_type="application/json")

    return routes


def _queue(stats: QueueStats, model: str) -> Queue:
    num_waiting = sum(stats.waiting.values())
    return Queue(
        model=model,
        waiting=num_waiting,
        waiting_by_priority={str(priority): count for priority, count in stats.waiting.items()},
        waiting_tokens=stats.waiting_cost,
        oldest_seconds=round(stats.oldest_age, 3) if num_waiting else None,
        running=stats.claimed,
        ready_workers=stats.num_ready_workers,
        drain_tokens_per_second=stats.drain_rate,
    )
