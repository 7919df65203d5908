"""The threads of an API process that run batches and delete files that have expired.

Any number of API processes run batches of one Redis database; a lease gives each batch to one of them.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import redis
import structlog

from api.background.periodic import start_periodic
from api.batches.run import BatchParts, BatchRun, Returned
from api.file_storage import FileStorage
from api.redis_clients import connect, is_unavailable
from api.shutdown import Shutdown
from api.submission import Submitter
from tokenmill.protocol.batch_records import Batch
from tokenmill.protocol.store.batch_store import BatchLost, BatchStore
from tokenmill.protocol.store.file_index import FileIndex
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

_log = structlog.get_logger(__name__)

NUM_RUNNERS = 4
"""Batches that one process runs at the same time."""
PERIOD_SECONDS = 1.0
RETRY_SECONDS = 5.0
"""Pause after an error."""
STOP_SECONDS = 5.0
SWEEP_SECONDS = 60.0
EXPIRED_AT_ONCE = 100
ORPHAN_SECONDS = 86400.0
"""Content without a record is deleted at this age: a record is written after its content."""
ORPHANS_SECONDS = 3600.0
"""Interval of the search for such content."""


class BatchRunners:
    """The threads. `start` starts them, and `join` waits for them after a stop was requested."""

    def __init__(self, settings: ApiSettings, shutdown: Shutdown) -> None:
        client = connect(settings.redis_url, NUM_RUNNERS + 2)
        store = TaskStore(client, retention_seconds=settings.retention_seconds)
        self._parts = BatchParts(
            settings=settings,
            batches=BatchStore(client),
            files=FileIndex(client),
            storage=FileStorage(settings.files_place),
            tasks=store,
            submitter=Submitter(settings, client, store),
            shutdown=shutdown,
        )
        self._sweeper = Sweeper(self._parts.files, self._parts.storage, self._parts.batches)
        self._threads = [
            threading.Thread(target=self._work, name=f"batches-{number}", daemon=True)
            for number in range(NUM_RUNNERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        start_periodic("files", self._sweeper.run)

    def join(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        pause = threading.Event()
        while not self._parts.shutdown.requested:
            pause.wait(self.turn())

    def turn(self) -> float:
        """Run one batch, if one waits. Returns the seconds until the next call. Raises nothing."""
        owner = secrets.token_hex(16)
        try:
            batch = self._parts.batches.take(owner)
        except Exception as error:  # noqa: BLE001 - it is logged
            if not is_unavailable(error):
                _log.exception("cannot take a batch; will retry")
            return RETRY_SECONDS
        if batch is None:
            return PERIOD_SECONDS
        return self._run(batch, owner)

    def _run(self, batch: Batch, owner: str) -> float:
        batch_id, seconds = batch.request.id, 0.0
        try:
            BatchRun(self._parts, batch, owner).run()
            _log.info("a batch has ended", batch=batch_id)
            return 0.0
        except BatchLost:
            # Another runner continues it.
            return 0.0
        except Returned:
            pass
        except Exception as error:  # noqa: BLE001 - it is logged
            # The client has logged an outage.
            if not is_unavailable(error):
                _log.exception("a batch failed; it will be continued", batch=batch_id)
            seconds = RETRY_SECONDS
        with suppress(redis.RedisError):
            self._parts.batches.release(batch_id, owner, seconds)
        return seconds


class Sweeper:
    """Deletes files that have expired, and content that no record names."""

    def __init__(
        self,
        files: FileIndex,
        storage: FileStorage,
        batches: BatchStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._storage = storage
        self._batches = batches
        self._clock = clock
        self._orphans_at = clock()

    def run(self) -> float:
        """Run once. Returns the seconds until the next run. Raises nothing."""
        try:
            self.delete_expired()
            if self._clock() >= self._orphans_at:
                self._orphans_at = self._clock() + ORPHANS_SECONDS
                self.delete_orphans()
        except Exception as error:  # noqa: BLE001 - it is logged
            if not is_unavailable(error):
                _log.exception("cannot delete files; will retry")
        return SWEEP_SECONDS

    def delete_expired(self) -> None:
        for file_id in self._files.expired(EXPIRED_AT_ONCE):
            if self._files.remove(file_id) != "in_use":
                self._storage.delete(file_id)

    def delete_orphans(self, age_seconds: float = ORPHAN_SECONDS) -> None:
        for name in self._storage.older_than(age_seconds):
            if not self._is_known(name):
                self._storage.delete(name)

    def _is_known(self, name: str) -> bool:
        if name.startswith("batch_"):
            batch = self._batches.get(name.partition(".")[0])
            return batch is not None and not batch.has_ended
        return self._files.get(name) is not None
