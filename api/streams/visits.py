"""One client's stay with one task: as long as a stream or a wait lasts.

Law: a client that goes away ends a task that is to end with its last reader. A wait that is over does not,
nor a server that stops: its clients come back within `READER_SECONDS`, to any server, or lapse.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import redis

from api.streams.presence import Shutdown, client_is_gone
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.readers import Readers

logger = logging.getLogger(__name__)

RENEW_SECONDS = 5.0
READER_SECONDS = 20.0
"""A reader of whom nothing is heard for so long has lapsed: its server died."""


class Visit:
    """To be entered before anything is sent. Touches Redis only for a task that is to end with its readers.

    `gone` and `cut_short` may be set by who serves the stay: its client went away, or the server stops. May
    raise Redis's errors when it is entered, and at no other time.
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
        self.gone = False
        self.cut_short = False

    def is_over(self) -> bool:
        """Whether the server stops or the client has gone away. Ask at least once a second."""
        self.gone = self.gone or client_is_gone(self._environ)
        if self._readers and not self.gone and self._clock() - self._renewed_at >= RENEW_SECONDS:
            self._renew(self._readers)
        return self.gone or self._shutdown.requested

    def __enter__(self) -> Self:
        if self._readers:
            self._readers.read(self._task_id, self._name, READER_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._readers:
            return
        if self.cut_short:
            # Its client has the whole time to come back, from now on.
            self._renew(self._readers)
        else:
            self._leave(self._readers, gone=self.gone or client_is_gone(self._environ))

    def _renew(self, readers: Readers) -> None:
        try:
            readers.read(self._task_id, self._name, READER_SECONDS)
            self._renewed_at = self._clock()
        except redis.RedisError as error:
            logger.debug("task %s: a reader cannot be noted, trying again: %s", self._task_id, error)

    def _leave(self, readers: Readers, *, gone: bool) -> None:
        try:
            if readers.leave(self._task_id, self._name, gone=gone):
                logger.info("task %s was cancelled: its last reader went away", self._task_id)
        except redis.RedisError as error:
            # It lapses, and the reaper does what could not be done now.
            logger.debug("task %s: a reader that left cannot be noted: %s", self._task_id, error)
