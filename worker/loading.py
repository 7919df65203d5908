"""What a worker shows of itself while its model loads: the API waits for it, people want to see it move.

Knows not how a model is loaded.
"""

import errno
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from monitoring.worker import WorkerMetrics
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.errors import SettingError
from worker.service import Service

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
RECORD_SECONDS = 15.0
"""Native code that reads a checkpoint may keep all threads from running for a while."""


@contextmanager
def unusable_machine() -> Iterator[None]:
    """Turn a lack of libraries or memory into `SettingError`."""
    try:
        yield
    except ImportError as error:
        raise SettingError(
            f"a library that the worker needs cannot be imported; is 'tokenmill[worker]' installed?"
            f" {error!s:.200}{_limit()}"
        ) from error
    except MemoryError as error:
        raise _short_of_memory(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise _short_of_memory(str(error)) from error


def _short_of_memory(reason: str) -> SettingError:
    detail = f" ({reason})" if reason else ""
    return SettingError(
        f"TOKENMILL_MODEL: not enough memory to load it{detail}{_limit()}; choose a smaller model"
    )


def _limit() -> str:
    """The limit of this process's address space, which libraries report as they like when they meet it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; this process may map {limit} bytes (ulimit -v)"


class Loading:
    """A context in which `progress` lines are logged and stand in the worker's record."""

    def __init__(self, client: Any, record: WorkerRecord, metrics: WorkerMetrics) -> None:
        self._store = TaskStore(client)
        self._record = record
        self._metrics = metrics
        self._began = time.monotonic()
        self._service = Service(
            "loading",
            self._beat,
            client=client,
            on_redis_error=metrics.redis_error,
            on_failure=lambda name, error: logger.error("%s: %s", name, error),
        )

    def __enter__(self) -> "Loading":
        self._began = time.monotonic()
        self._service.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.stop()
        self._service.join(RECORD_SECONDS)
        self._metrics.model_load_seconds(time.monotonic() - self._began)

    def progress(self, line: str) -> None:
        logger.info("%s", line)
        self._record = replace(self._record, detail=line)

    def _beat(self) -> None:
        self._store.put_worker(self._record, ttl_seconds=RECORD_SECONDS)
        time.sleep(BEAT_SECONDS)
