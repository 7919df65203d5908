"""What the log says of one task at its end: ids, tokens and times, and nothing that the client wrote."""

from typing import Any

import structlog

from tokenmill.protocol.records import Claimed, Settlement

_log = structlog.get_logger(__name__)


class TaskTrace:
    """One attempt at a task. Times are those of the worker's monotonic clock, in seconds.

    An attempt that resumes a task knows neither when it was first scheduled nor when its first token came.
    """

    __slots__ = ("_accepted", "_fields", "_is_resumed", "_scheduled", "first_token")

    def __init__(
        self, task_id: str, *, accepted: float = 0.0, is_resumed: bool = False, **fields: Any
    ) -> None:
        """`accepted`: when the task was accepted. `fields`: further fields of the line."""
        self._accepted = accepted
        self._scheduled: float | None = None
        self.first_token: float | None = None
        self._is_resumed = is_resumed
        self._fields = {"task": task_id, **fields}

    @classmethod
    def of(cls, task: Claimed) -> "TaskTrace":
        return cls(
            task.task_id,
            accepted=task.claimed_at - task.waited_seconds,
            is_resumed=task.has_started or bool(task.entries),
            request_id=task.request_id,
            tenant=task.tenant,
            attempt=task.attempt,
        )

    def scheduled(self, now: float) -> None:
        if self._scheduled is None:
            self._scheduled = now

    def ended(self, settlement: Settlement, now: float, error_code: str | None) -> None:
        """Log the end. Messages of errors are left out: they may quote the request."""
        _log.info(
            "task ended",
            **self._fields,
            status=settlement.status,
            finish_reason=settlement.reason,
            **({"error": error_code} if error_code else {}),
            prompt_tokens=settlement.prompt_tokens,
            completion_tokens=settlement.completion_tokens,
            **self._times(now),
        )

    def cancelled(self, now: float, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Log the end of a task that was cancelled while this worker owned it."""
        _log.info(
            "task ended",
            **self._fields,
            status="cancelled",
            finish_reason="cancelled",
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            **self._times(now),
        )

    def _times(self, now: float) -> dict[str, Any]:
        moments: dict[str, float | None] = {"total_seconds": now}
        if not self._is_resumed:
            moments = {
                "queue_seconds": self._scheduled,
                "ttft_seconds": self.first_token,
                "total_seconds": now,
            }
        return {
            name: None if moment is None else round(max(0.0, moment - self._accepted), 3)
            for name, moment in moments.items()
        }
