"""Log lines of what a reaper did. The API and the workers reap, and whoever ends a task logs its end."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog

_log = structlog.get_logger(__name__)


class _Failure(Protocol):
    def _asdict(self) -> dict[str, str]: ...


class ReapedTasks(Protocol):
    """`tokenmill.protocol.records.Reaped`."""

    @property
    def returned(self) -> Sequence[str]: ...
    @property
    def timed_out(self) -> Sequence[str]: ...
    @property
    def cancelled(self) -> Sequence[str]: ...
    @property
    def poisoned(self) -> Sequence[str]: ...
    @property
    def lost(self) -> Sequence[str]: ...
    @property
    def failures(self) -> Sequence[_Failure]: ...


class _End(NamedTuple):
    level: str
    status: str
    reason: str


_ENDS = {
    "timed_out": _End("info", "failed", "timeout"),
    "cancelled": _End("info", "cancelled", "cancelled"),
    # Several workers died of it.
    "poisoned": _End("error", "failed", "poison"),
    # Redis lost some of its keys.
    "lost": _End("error", "failed", "data_lost"),
}


def log_reaped(reaped: ReapedTasks) -> None:
    """One line for each task and each record that could not be processed."""
    for task_id in reaped.returned:
        _log.warning("task of a dead worker returned to the queue", task=task_id)
    for name, end in _ENDS.items():
        for task_id in getattr(reaped, name):
            getattr(_log, end.level)("task ended", task=task_id, status=end.status, finish_reason=end.reason)
    for failure in reaped.failures:
        _log.error("a damaged record is skipped", **failure._asdict())
