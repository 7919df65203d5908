"""Repairs the indexes in Redis from the run hashes, so that every accepted task ends even if an index was
deleted, evicted or overwritten.

Scans the keys of the database in pages, outside of scripts. Idempotent; audits may run concurrently.
"""

from typing import Any, Protocol

from tokenmill.protocol import keys
from tokenmill.protocol.store.scripting import RedisClient, Scripts

PAGE = 500
LEASE_SECONDS = 10.0
"""Lease given to a claimed task without one; a live worker renews it before it lapses."""


class ScanningClient(RedisClient, Protocol):
    """The commands of redis-py's `Redis` that an audit calls besides scripts."""

    def scan(self, cursor: int = ..., match: str = ..., count: int = ...) -> Any: ...
    def exists(self, *names: str) -> Any: ...
    def type(self, name: str) -> Any: ...
    def smembers(self, name: str) -> Any: ...
    def set(self, name: str, value: str, /, *, nx: bool = ..., px: int = ...) -> Any: ...


class Audit:
    """Audits all models in one database. Every method may raise the client's connection errors."""

    def __init__(self, client: ScanningClient, *, retention_seconds: float = 3600) -> None:
        self._client = client
        self._scripts = Scripts(client, retention_seconds=retention_seconds)

    def is_due(self, period_seconds: float) -> bool:
        """True once per period across all processes, and while a script has reported damage."""
        due = self._client.set(keys.AUDITED, "1", nx=True, px=round(period_seconds * 1000))
        return bool(due) or bool(self._client.exists(keys.DAMAGED))

    def run(self) -> int:
        """Check every task. Returns the number of tasks and models that were repaired."""
        is_outbox_lost = int(self._client.type(keys.OUTBOX) != b"stream")
        num_repaired, cursor, slugs = 0, 0, set()
        prefix = keys.run("")
        while True:
            cursor, names = self._client.scan(cursor, match=f"{prefix}*", count=PAGE)
            ids = [name.decode().removeprefix(prefix) for name in names]
            if ids:
                repaired, live = self._scripts.run("audit/tasks", LEASE_SECONDS, is_outbox_lost, *ids)
                num_repaired += int(repaired)
                slugs.update(live)
            if not cursor:
                break
        for slug in slugs | self._damaged():
            num_repaired += int(self._scripts.run("audit/model", slug))
        return num_repaired

    def _damaged(self) -> set[bytes]:
        return set(self._client.smembers(keys.DAMAGED))
