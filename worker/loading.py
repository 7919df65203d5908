"""Loading a model: the worker's record meanwhile, and failures of this machine as settings errors."""

import errno
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from monitoring.worker import WorkerMetrics
from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.errors import SettingError
from worker.service import Service

_log = structlog.get_logger(__name__)

BEAT_SECONDS = 1.0
RECORD_SECONDS = 15.0
"""The record's lifetime. Native code that reads a checkpoint may block all threads for some seconds."""

_PHASES = ("looking for", "converting", "compiling", "quantizing", "loading")
"""Beginnings of the lines that name a phase which may take long. The others are details."""

_UNWRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}
)


class Loading:
    """A context that keeps the worker's record in Redis. `progress` lines are logged and shown in it."""

    def __init__(self, client: Any, record: WorkerRecord, metrics: WorkerMetrics) -> None:
        self.metrics = metrics
        self.clock: Callable[[], float] = time.monotonic
        self.outages = OutageLog(_log, "loading")
        self._store = TaskStore(client)
        self._record = record
        self._began_at = self.clock()
        self._service = Service("loading", self._beat, self, client)

    def __enter__(self) -> "Loading":
        self._began_at = self.clock()
        self._service.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.stop()
        self._service.join(RECORD_SECONDS)
        self.metrics.model_load_seconds(self.clock() - self._began_at)

    def progress(self, line: str) -> None:
        write = _log.info if line.startswith(_PHASES) else _log.debug
        write(line)
        self._record = replace(self._record, detail=line)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Loading continues without the record."""
        _log.error("a thread failed", thread=thread, error=str(error))

    def _beat(self) -> None:
        self._store.put_worker(self._record, ttl_seconds=RECORD_SECONDS)
        time.sleep(BEAT_SECONDS)


@contextmanager
def gc_paused() -> Iterator[None]:
    """A context for imports of large libraries. For the start of a process, which it affects as a whole.

    The garbage collector takes a sixth of the import of torch, in hundreds of runs, and finds nothing.
    Objects that exist afterwards are frozen: a full collection would otherwise stop all threads for some
    tenths of a second. Garbage left by the imports, some megabytes, is never freed.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def machine_errors_as_settings() -> Iterator[None]:
    """Raise `SettingError` for a missing library or a lack of memory."""
    try:
        yield
    except ImportError as error:
        raise SettingError(
            f"a library that the worker needs cannot be imported; is 'tokenmill[worker]' installed?"
            f" {error!s:.200}{_address_space_limit()}"
        ) from error
    except MemoryError as error:
        raise _out_of_memory(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise _out_of_memory(str(error)) from error


@contextmanager
def cache_errors_as_settings(directory: str) -> Iterator[None]:
    """Raise `SettingError` if the cache directory cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE or not _concerns(error.filename, directory):
            raise
        raise SettingError(
            f"the cache directory {directory} cannot be written: {error.strerror}: {error.filename}; choose"
            " another with TOKENMILL_CACHE_DIR"
        ) from error


def _out_of_memory(reason: str) -> SettingError:
    detail = f" ({reason})" if reason else ""
    limit = _address_space_limit()
    return SettingError(
        f"TOKENMILL_MODEL: not enough memory to load it{detail}{limit}; choose a smaller model"
    )


def _address_space_limit() -> str:
    """Names the limit, since libraries report it in many ways when they reach it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; this process may map {limit} bytes (ulimit -v)"


def _concerns(name: object, directory: str) -> bool:
    """Whether the path is in the directory, or above it: a missing directory fails at its nearest parent."""
    if not isinstance(name, str | bytes):
        return False
    path, cache = (Path(os.path.abspath(os.fsdecode(each))) for each in (name, directory))
    return path.is_relative_to(cache) or cache.is_relative_to(path)
