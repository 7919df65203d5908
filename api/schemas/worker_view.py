"""Converts the record of a worker into the `WorkerView` of the HTTP API."""

from api.schemas.replies import WorkerView
from tokenmill.protocol.records import WorkerRecord


def worker_view(record: WorkerRecord) -> WorkerView:
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
