"""One RQ worker that holds many jobs at once: it starts the threads, waits, and stops them in order.

Law: signal handlers only leave a note, and the main thread follows it; whatever ends the worker, what it
holds goes back to the front of its queue, and the process ends in time. Uses of RQ's `BaseWorker` only what
shows a worker to others: never its dequeuing, its maintenance or its commands, which know one job at a time.
"""

import logging
import os
import queue
import secrets
import signal
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis
from rq import Queue, worker_registration
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker, WorkerStatus

from engine.errors import EngineDead
from tokenmill.protocol import naming
from tokenmill.protocol.records import ModelCard, WorkerRecord, WorkerState
from tokenmill.protocol.store.task_store import TaskStore
from worker.loop import SteppingEngine
from worker.preparation import ServedModel
from worker.threads import WorkerContext, WorkerThreads

logger = logging.getLogger(__name__)

EXIT_STOPPED = 0
"""Told to stop, and stopped: by a signal or by RQ's `shutdown` command."""
EXIT_FAILED = 70
"""The engine is dead or a thread failed: what was held was handed back, start again."""

REQUEST_THREADS = frozenset({"loop", "publisher"})
"""Threads that step requests and store what comes of them: what ends one of them may be the fault of a
request.

The intake is none of them: it catches what the preparation of a request raises.
"""

RQ_SECONDS = 60
"""A worker that died without a word leaves `rq info` so long after."""
SHUTDOWN_SECONDS = 14.0
"""Hard end of the process, counted from the end of the grace period: a supervisor kills 15 s after that.

The parts below come in this order and make 13 s. A call to Redis that hangs as its part is over may take some
seconds more; if that is too long, the leases of what is held lapse instead.
"""
LAST_STEP_SECONDS = 4.0
FLUSH_SECONDS = 4.0
HAND_BACK_SECONDS = 3.0
SIGN_OFF_SECONDS = 2.0
DRAIN_POLL_SECONDS = 0.05
NOTE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A thread ended without being told to."""

    thread: str
    error: BaseException


def new_worker_name() -> str:
    """Never used before: RQ refuses a name whose earlier worker did not say good-bye."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class BatchWorker(BaseWorker):
    """Serves one model with one engine. `name`: as `new_worker_name` makes it. `card`: what the API is to
    know of the model; it is written again where Redis has lost it.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        model: ServedModel,
        given: WorkerContext,
        *,
        name: str | None = None,
        card: ModelCard | None = None,
    ) -> None:
        connection = given.connect("rq")
        super().__init__(
            [
                Queue(
                    naming.queue_name(model.slug, priority, naming.DEFAULT_TENANT),
                    connection=connection,
                    serializer=JSONSerializer,
                )
                for priority in naming.PRIORITIES
            ],
            name=name or new_worker_name(),
            connection=connection,
            serializer=JSONSerializer,
        )
        self._model = model
        self._card = card
        self._context = given
        self._max_num_seqs = engine.config.max_num_seqs
        self._started_at = time.time()
        # Not RQ's `register_birth`, which needs Redis at this moment: the first beat of the leases tells all
        # of it, and is made again until it works.
        self.birth_date = self.last_heartbeat = datetime.now(UTC)
        self._is_draining = False
        self._has_crashed = False
        self._last_step_seconds = LAST_STEP_SECONDS
        self._store = TaskStore(connection, retention_seconds=given.timing.retention_seconds)
        # Signal handlers put here: a SimpleQueue, unlike an Event, may be entered twice by one thread.
        self._notes: queue.SimpleQueue[str | Failure] = queue.SimpleQueue()
        self._threads = WorkerThreads(
            engine,
            model,
            given,
            worker_name=self.name,
            announce=self._announce,
            on_shutdown=lambda: self.stop("RQ's shutdown command"),
            on_failure=self._note_failure,
        )

    @property
    def condition(self) -> WorkerState:
        """What others are told of this worker."""
        if self._is_draining:
            return "draining"
        return "stalled" if self._threads.watchdog.is_stalled or self._threads.trouble else "ready"

    @property
    def is_ready(self) -> bool:
        return self.condition == "ready"

    def work(self) -> int:  # type: ignore[override] # RQ's options are about one job at a time; none is taken
        """Until a signal, a command or a failure ends it; gives the exit status of the process."""
        self._initialize()
        try:
            return self._follow_notes()
        finally:
            self._shut_down()

    def stop(self, why: str) -> None:
        """As a signal does: the first drains, the second ends at once. From any thread."""
        self._notes.put(why)

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT stop this worker. For the main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self.stop(signal.Signals(received).name))

    def _initialize(self) -> None:
        self._threads.start()
        logger.info("worker %s serves %s", self.name, self._model.name)

    def _note_failure(self, thread: str, error: BaseException) -> None:
        # First: without memory the log line may fail as well.
        self._notes.put(Failure(thread, error))
        trace = None if isinstance(error, EngineDead) else error
        logger.critical("the %s failed: %s: %s", thread, type(error).__name__, error, exc_info=trace)

    def _follow_notes(self) -> int:
        note = self._next_note()
        if isinstance(note, Failure):
            return self._fail(note)
        logger.info("%s: claims nothing more, finishes what ends in time", note)
        self._is_draining = True
        self._threads.stop_claiming()
        return self._drain()

    def _next_note(self) -> str | Failure:
        """Waits in short pieces: a signal that the kernel gives to another thread ends no wait here."""
        while True:
            try:
                return self._notes.get(timeout=NOTE_SECONDS)
            except queue.Empty:
                continue

    def _drain(self) -> int:
        deadline = self._context.clock() + self._context.timing.grace_seconds
        while self._threads.has_work and self._context.clock() < deadline:
            try:
                note = self._notes.get(timeout=DRAIN_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(note, Failure):
                return self._fail(note)
            logger.info("%s again: ends now", note)
            self._last_step_seconds = 0.0
            break
        return EXIT_STOPPED

    def _fail(self, failure: Failure) -> int:
        # Any exception there, of the device or of host code, may be the fault of a request, which would end
        # the next worker too.
        self._has_crashed = failure.thread in REQUEST_THREADS
        return EXIT_FAILED

    def _shut_down(self) -> None:
        self._is_draining = True
        self._threads.watchdog.end_within(SHUTDOWN_SECONDS)
        self._threads.stop_stepping(self._last_step_seconds, claim_seconds=LAST_STEP_SECONDS)
        self._threads.flush(FLUSH_SECONDS)
        self._threads.hand_back(HAND_BACK_SECONDS, crashed=self._has_crashed)
        self._threads.stop(SIGN_OFF_SECONDS)
        self._say_good_bye()

    def _say_good_bye(self) -> None:
        try:
            self._store.drop_worker(self.name)
            self.register_death()  # type: ignore[no-untyped-call] # RQ's
        except Exception as error:  # noqa: BLE001 - the records expire by themselves; the exit status matters more
            logger.warning("could not sign off: %s", error)

    def _announce(self) -> None:
        """To the API as a record, and to RQ's tools as a worker of theirs. Raises `RedisError`."""
        try:
            self._put_record()
            self._show_to_rq()
        except redis.RedisError:
            # The service that calls this renews the connections of its own client, not of this one.
            self.connection.connection_pool.disconnect()
            raise

    def _put_record(self) -> None:
        load = self._threads.loop.load
        record = WorkerRecord(
            name=self.name,
            model=self._model.name,
            slug=self._model.slug,
            state=self.condition,
            detail=self._threads.trouble,
            started_at=self._started_at,
            running=load.num_running,
            waiting=load.num_waiting,
            max_num_seqs=self._max_num_seqs,
        )
        self._store.put_worker(record, ttl_seconds=self._context.timing.lease_seconds)
        if self._card:
            self._store.restore_model_card(self._model.slug, self._card)

    def _show_to_rq(self) -> None:
        state = WorkerStatus.BUSY if self._threads.owned_tasks else WorkerStatus.IDLE
        with self.connection.pipeline(transaction=False) as pipe:
            self.heartbeat(RQ_SECONDS, pipeline=pipe)
            # All of it and the registration too: after an outage the record may be gone.
            pipe.hset(self.key, mapping={**self.serialize(), "state": state.value})
            pipe.hset(self.key, "successful_job_count", str(self._threads.publisher.num_completed))
            pipe.hset(self.key, "failed_job_count", str(self._threads.publisher.num_failed))
            worker_registration.register(self, pipe)
            pipe.execute()

    def _set_ip_address(self, connection: Any) -> None:
        """For show. Redis may be away, and that is no reason to load a model once more."""
        try:
            super()._set_ip_address(connection)
        except redis.RedisError:
            self.ip_address = "unknown"

    def _set_connection(self, connection: Any) -> Any:
        """RQ would make it wait seven minutes for a dead server."""
        return connection
