"""Registers a client as a reader of a task for as long as its stream or wait lasts.

With `on_disconnect: cancel`, a task ends when its last reader disconnects. A wait that times out does not
end it, and neither does a server that stops: its clients have `READER_SECONDS` to reconnect to any server.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import redis
import structlog

from api.shutdown import Shutdown
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.readers import Readers

_log = structlog.get_logger(__name__)

RENEW_SECONDS = 5.0
READER_SECONDS = 20.0
"""Lease duration. A reader that misses it is dropped: its server has died."""
_DISCONNECTED = "waitress.client_disconnected"
"""Key of the WSGI environment under which Waitress puts its check for a closed connection."""


def client_disconnected(environ: Mapping[str, Any]) -> bool:
    """Whether the client has closed the connection. False where the server cannot tell. Does not block."""
    check: Callable[[], bool] | None = environ.get(_DISCONNECTED)
    return check is not None and check()


class ReaderLease:
    """A context manager to enter before anything is sent. Calls Redis only for tasks with
    `on_disconnect: cancel`.

    The caller may set `disconnected` (the client has gone away) and `keep` (the server is stopping, so the
    client keeps the whole lease to reconnect). Only `__enter__` raises Redis errors.
    """

    def __init__(
        self,
        readers: Readers,
        snapshot: TaskSnapshot,
        environ: Mapping[str, Any],
        shutdown: Shutdown,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = readers if snapshot.cancel_on_disconnect else None
        self._task_id = snapshot.task_id
        self._environ = environ
        self._shutdown = shutdown
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._renewed_at = clock()
        self.disconnected = False
        self.keep = False

    def is_over(self) -> bool:
        """Whether the server is stopping or the client has disconnected. Call it at least once a second."""
        self.disconnected = self.disconnected or client_disconnected(self._environ)
        is_due = self._clock() - self._renewed_at >= RENEW_SECONDS
        if self._readers and not self.disconnected and is_due:
            self._renew(self._readers)
        return self.disconnected or self._shutdown.requested

    def __enter__(self) -> Self:
        if self._readers:
            self._readers.read(self._task_id, self._name, READER_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._readers:
            return
        if self.keep:
            self._renew(self._readers)
        else:
            self._release(self._readers)

    def _renew(self, readers: Readers) -> None:
        try:
            readers.read(self._task_id, self._name, READER_SECONDS)
            self._renewed_at = self._clock()
        except redis.RedisError as error:
            _log.debug("cannot renew a reader, will retry", task=self._task_id, error=str(error))

    def _release(self, readers: Readers) -> None:
        gone = self.disconnected or client_disconnected(self._environ)
        try:
            if readers.leave(self._task_id, self._name, gone=gone):
                _log.info("task cancelled: its last reader disconnected", task=self._task_id)
        except redis.RedisError as error:
            # The lease expires, and the reaper then cancels the task.
            _log.debug("cannot release a reader", task=self._task_id, error=str(error))
