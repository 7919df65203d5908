"""The worker's public records: one for the API, and one for RQ's tools (`rq info`, rq-dashboard)."""

import time
from datetime import UTC, datetime
from typing import Any

import redis
import structlog
from rq import Queue, worker_registration
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker, WorkerStatus

from tokenmill.protocol import naming
from tokenmill.protocol.records import WorkerRecord
from worker.context import WorkerContext
from worker.loop import Loop
from worker.publisher import Publisher

_log = structlog.get_logger(__name__)

RQ_SECONDS = 60
"""`rq info` shows a worker that died for this time."""


class Registration(BaseWorker):
    """Shows the worker to RQ as a worker of its own.

    Only RQ's registration and heartbeat are used. Its dequeuing, maintenance and commands assume one job at a
    time.
    """

    def __init__(self, context: WorkerContext, max_num_seqs: int, loop: Loop, publisher: Publisher) -> None:
        connection = context.connect("rq")
        queues = [
            Queue(
                naming.queue_name(context.model.slug, priority, naming.DEFAULT_TENANT),
                connection=connection,
                serializer=JSONSerializer,
            )
            for priority in naming.PRIORITIES
        ]
        super().__init__(queues, name=context.name, connection=connection, serializer=JSONSerializer)
        self._context = context
        self._max_num_seqs = max_num_seqs
        self._loop = loop
        self._publisher = publisher
        self._store = context.new_store(connection)
        self._started_at = time.time()
        # Not RQ's `register_birth`, which needs Redis now. `announce` writes the same until it succeeds.
        self.birth_date = self.last_heartbeat = datetime.now(UTC)

    def announce(self) -> None:
        """Write both records. Raises `RedisError`."""
        try:
            self._write_worker_record()
            self._write_rq_record()
        except redis.RedisError:
            # The caller's service only renews the connections of its own client.
            self.connection.connection_pool.disconnect()
            raise

    def remove(self) -> None:
        """Remove both records. If that fails they expire."""
        try:
            self._store.drop_worker(self.name)
            self.register_death()  # type: ignore[no-untyped-call] # RQ's
        except Exception as error:  # noqa: BLE001 - must not change the exit status
            _log.warning("the worker's records could not be removed", error=str(error))
        finally:
            self.connection.close()

    def _write_worker_record(self) -> None:
        load, failing = self._loop.load, self._context.watchdog.failing_threads
        record = WorkerRecord(
            name=self.name,
            model=self._context.model.name,
            slug=self._context.model.slug,
            state=self._context.state,
            detail=f"threads without progress: {', '.join(failing)}" if failing else "",
            started_at=self._started_at,
            running=load.num_running,
            waiting=load.num_waiting,
            max_num_seqs=self._max_num_seqs,
        )
        self._store.put_worker(record, ttl_seconds=self._context.timing.lease_seconds)
        if self._context.card:
            self._store.restore_model_card(self._context.model.slug, self._context.card)

    def _write_rq_record(self) -> None:
        state = WorkerStatus.BUSY if self._context.owned_tasks else WorkerStatus.IDLE
        with self.connection.pipeline(transaction=False) as pipe:
            self.heartbeat(RQ_SECONDS, pipeline=pipe)
            # The whole record and the registration each time, since an outage may have removed them.
            pipe.hset(self.key, mapping={**self.serialize(), "state": state.value})
            pipe.hset(self.key, "successful_job_count", str(self._publisher.num_completed))
            pipe.hset(self.key, "failed_job_count", str(self._publisher.num_failed))
            worker_registration.register(self, pipe)
            pipe.execute()

    def _set_ip_address(self, connection: Any) -> None:
        """Called by RQ's constructor. Redis may be away then, and the address is only shown."""
        try:
            super()._set_ip_address(connection)
        except redis.RedisError:
            self.ip_address = "unknown"

    def _set_connection(self, connection: Any) -> Any:
        """Called by RQ's constructor, which would set a socket timeout of seven minutes."""
        return connection
