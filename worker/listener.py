"""Receives what Redis channels tell this worker: claimable tasks, cancels, RQ's commands.

Invariant: a message is only a hint. A lost message costs time until the next poll, renewal or write.
"""

import json
from typing import Any

import redis
import structlog
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from worker.context import WorkerContext

_log = structlog.get_logger(__name__)

LISTEN_SECONDS = 1.0


class Listener:
    """`turn` belongs to one thread. RQ's `stop-job` cancels an owned task like any other cancel."""

    def __init__(self, client: Any, store: TaskStore, context: WorkerContext) -> None:
        self._client = client
        self._store = store
        self._context = context
        self._wake_channel = keys.wake(context.model.slug)
        self._command_channel: str = PUBSUB_CHANNEL_TEMPLATE % context.name
        self._pubsub: Any = None
        # Kept while its handling fails.
        self._message: dict[str, Any] | None = None

    def turn(self) -> None:
        """Handle one message, or none within `LISTEN_SECONDS`.

        Raises `RedisError`. The next turn handles the same message again and subscribes anew.
        """
        try:
            if self._message is None:
                self._message = self._subscribed().get_message(timeout=LISTEN_SECONDS)
            if self._message is not None:
                self._handle(self._message)
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

    def _handle(self, message: dict[str, Any]) -> None:
        channel = message["channel"].decode()
        if message["type"] != "message" or channel == self._wake_channel:
            # Also when a subscription is confirmed: messages before it were missed.
            self._context.wake.set()
        elif channel == keys.CONTROL:
            self._cancel(_read(message["data"]))
        else:
            self._run_command(_read(message["data"]))

    def _cancel(self, command: dict[str, Any]) -> None:
        if ownership := self._context.owned_tasks.find(str(command.get("cancel"))):
            self._context.drop_cancelled(ownership)

    def _run_command(self, command: dict[str, Any]) -> None:
        match command.get("command"):
            case "shutdown":
                self._context.stop("RQ's shutdown command")
            case "stop-job" | "stop-execution":
                if ownership := self._context.owned_tasks.find(str(command.get("job_id"))):
                    # The script notifies all workers, this one included.
                    self._store.cancel(ownership.task_id)
            case other:
                _log.warning("RQ's command is not supported", command=repr(other))


def _read(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, or an empty one: any client of Redis can publish anything."""
    try:
        command = json.loads(data)
    except ValueError:
        command = None
    return command if isinstance(command, dict) else {}
