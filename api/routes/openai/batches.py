"""The routes of `/v1/batches`. `api/batches/` runs the batches."""

import time

from flask import Response
from flask_openapi3.blueprint import APIBlueprint

from api.authentication import SCHEME_NAME, current_tenant
from api.problems import Problem, bad_field
from api.routes.openai.completions import TAG
from api.routes.openai.file_services import (
    FileServices,
    json_reply,
    new_id,
    no_file,
    own_hash,
    page_members,
)
from api.schemas.openai.files import (
    BatchBody,
    BatchError,
    BatchErrors,
    BatchesQuery,
    BatchList,
    BatchPath,
    BatchView,
    RequestCounts,
    window_seconds,
)
from api.schemas.replies import PROBLEM_REPLY
from tokenmill.protocol.batch_records import Batch, BatchRequest
from tokenmill.protocol.store.batch_store import MAX_OPEN_BATCHES
from tokenmill.protocol.store.file_index import PageQuery

_RETRY_SECONDS = 60
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_routes(services: FileServices) -> APIBlueprint:
    """The blueprint of `/v1/batches`."""
    batches = _Batches(services)
    routes = APIBlueprint(
        "batches",
        __name__,
        url_prefix="/v1/batches",
        abp_tags=[TAG],
        abp_security=[{SCHEME_NAME: []}] if services.tasks.settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.post("", summary="Create a batch", responses={200: BatchView})
    def create(body: BatchBody) -> Response:
        """Runs the requests of a file as tasks, after all others. Its results are two files."""
        return batches.create(body)

    @routes.get("", summary="List batches", responses={200: BatchList})
    def list_batches(query: BatchesQuery) -> Response:
        """The newest first."""
        return batches.list(query)

    @routes.get("/<batch_id>", summary="Get a batch", responses={200: BatchView})
    def get_batch(path: BatchPath) -> Response:
        """The state of a batch."""
        return json_reply(batches.view(batches.find(path.batch_id)))

    @routes.post("/<batch_id>/cancel", summary="Cancel a batch", responses={200: BatchView})
    def cancel(path: BatchPath) -> Response:
        """Ends a batch. Its results so far are kept."""
        return batches.cancel(path.batch_id)

    return routes


class _Batches:
    """The handlers of `batch_routes`."""

    def __init__(self, services: FileServices) -> None:
        self._services = services
        self._settings = services.tasks.settings

    def create(self, body: BatchBody) -> Response:
        input_file = self._services.files.get(body.input_file_id, own_hash())
        now = time.time()
        if input_file is None or input_file.expires_at <= now:
            raise no_file("input_file_id")
        if input_file.purpose != "batch":
            raise bad_field("input_file_id", "must be a file with the purpose `batch`")
        expiry = body.output_expires_after
        request = BatchRequest(
            id=new_id("batch_"),
            tenant=own_hash(),
            tenant_name=current_tenant(),
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_seconds(body.completion_window),
            output_seconds=expiry.seconds if expiry else self._settings.files_retention_seconds,
            metadata=body.metadata,
        )
        outcome = self._services.batches.create(request)
        if outcome == "no_file":
            raise no_file("input_file_id")
        if outcome == "full":
            detail = f"{MAX_OPEN_BATCHES} batches of this tenant have not ended; wait for one of them"
            raise Problem(429, "too_many_batches", detail, retry_after=_RETRY_SECONDS)
        return json_reply(self.view(self.find(request.id)))

    def list(self, query: BatchesQuery) -> Response:
        wanted = PageQuery(tenant=own_hash(), after=query.after, limit=query.limit)
        found, has_more = self._services.batches.page(wanted)
        views = [self.view(batch) for batch in found]
        return json_reply(BatchList(data=views, has_more=has_more, **page_members(views)))

    def find(self, batch_id: str) -> Batch:
        """A batch of the tenant of the call. Raises `Problem` (404)."""
        batch = self._services.batches.get(batch_id, own_hash())
        if batch is None:
            raise Problem(404, "batch_not_found", "there is no such batch", param="batch_id")
        return batch

    def cancel(self, batch_id: str) -> Response:
        batch = self.find(batch_id)
        if batch.has_ended and batch.status != "cancelled":
            detail = f"the batch has ended as {batch.status}"
            raise Problem(409, "batch_ended", detail, param="batch_id", headers={"x-should-retry": "false"})
        return json_reply(self.view(self._services.batches.cancel(batch_id) or batch))

    def view(self, batch: Batch) -> BatchView:
        """The reply that shows a batch."""
        request = batch.request
        is_cancelling = "cancelling_at" in batch.times and not batch.has_ended
        times = {f"{name}_at": _seconds(batch.times.get(f"{name}_at")) for name in _TIMES}
        errors = [BatchError.model_validate(dict(error)) for error in batch.errors]
        return BatchView.model_validate(
            {
                "id": request.id,
                "endpoint": request.endpoint,
                "model": self._settings.public_model,
                "errors": BatchErrors(data=errors) if errors else None,
                "input_file_id": request.input_file_id,
                "completion_window": request.completion_window,
                "status": "cancelling" if is_cancelling else batch.status,
                "output_file_id": batch.output_file_id,
                "error_file_id": batch.error_file_id,
                "created_at": int(request.created_at),
                "expires_at": int(request.expires_at),
                "request_counts": RequestCounts(
                    total=batch.total, completed=batch.completed, failed=batch.failed
                ),
                "metadata": dict(request.metadata) if request.metadata is not None else None,
                **times,
            }
        )


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
