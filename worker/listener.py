"""Hears what Redis's channels tell this worker: that something can be claimed, cancels, RQ's commands.

Law: a message is a hint, never the truth. What is missed shows at the next poll, renewal or write.
"""

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import redis
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from worker.ownership import OwnedTasks, Ownership

logger = logging.getLogger(__name__)

LISTEN_SECONDS = 1.0


class Listener:
    """`turn` belongs to one thread.

    `on_cancel` gets held tasks that were cancelled; `on_shutdown` is called when RQ's `shutdown` command
    comes. RQ's `stop-job` cancels a held task like any other cancel does.
    """

    def __init__(
        self,
        client: Any,
        store: TaskStore,
        owned_tasks: OwnedTasks,
        *,
        slug: str,
        worker_name: str,
        wake: threading.Event,
        on_cancel: Callable[[Ownership], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        self._client = client
        self._store = store
        self._owned_tasks = owned_tasks
        self._wake = wake
        self._on_cancel = on_cancel
        self._on_shutdown = on_shutdown
        self._wake_channel = keys.wake(slug)
        self._command_channel: str = PUBSUB_CHANNEL_TEMPLATE % worker_name
        self._pubsub: Any = None
        self._message: dict[str, Any] | None = None

    def turn(self) -> None:
        """Follow one message, or none after a moment.

        Raises `RedisError`; the next turn first follows what could not be followed, and subscribes anew.
        """
        try:
            if self._message is None:
                self._message = self._subscribed().get_message(timeout=LISTEN_SECONDS)
            if self._message is not None:
                self._follow(self._message)
        except redis.RedisError:
            self.close()
            raise
        self._message = None

    def close(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None

    def _subscribed(self) -> Any:
        if self._pubsub is None:
            pubsub = self._client.pubsub()
            pubsub.subscribe(self._wake_channel, keys.CONTROL, self._command_channel)
            self._pubsub = pubsub
        return self._pubsub

    def _follow(self, message: dict[str, Any]) -> None:
        channel = message["channel"].decode()
        if message["type"] != "message" or channel == self._wake_channel:
            # A confirmed subscription too: what was told before it went unheard.
            self._wake.set()
        elif channel == keys.CONTROL:
            self._control(_read(message["data"]))
        else:
            self._command(_read(message["data"]))

    def _control(self, command: dict[str, Any]) -> None:
        if ownership := self._owned_tasks.find(str(command.get("cancel"))):
            self._on_cancel(ownership)

    def _command(self, command: dict[str, Any]) -> None:
        match command.get("command"):
            case "shutdown":
                self._on_shutdown()
            case "stop-job" | "stop-execution":
                if held := self._owned_tasks.find(str(command.get("job_id"))):
                    # Its script tells all workers, this one too.
                    self._store.cancel(held.task_id)
            case other:
                logger.warning("RQ's command %r does nothing here", other)


def _read(data: bytes) -> dict[str, Any]:
    """Anybody can publish anything: what is no JSON object says nothing."""
    try:
        command = json.loads(data)
    except ValueError:
        command = None
    return command if isinstance(command, dict) else {}
