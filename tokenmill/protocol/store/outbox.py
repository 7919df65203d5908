"""The webhooks that wait in Redis for delivery. Each method runs one script.

The script that ends a task adds its webhook. Invariant: a webhook leaves only when delivered or given up; if
its deliverer dies, another takes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.protocol.store.scripting import RedisClient, Scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class Undelivered:
    """A webhook taken by a deliverer. `tries`: failed attempts so far. `tenant`: of its task."""

    entry_id: str
    task_id: str
    url: str
    tries: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to deliver. `status`: of the reply, or None without one. `error`: why it failed, or ""."""

    status: int | None
    error: str = ""

    @property
    def texts(self) -> tuple[str, str]:
        """As the scripts take them."""
        return "" if self.status is None else str(self.status), self.error


class Outbox:
    """Webhooks of one Redis database. `client`, `retention_seconds`: as for the task store.

    Every method may raise the client's connection errors and can then be called again with the same
    arguments.
    """

    def __init__(self, client: RedisClient, *, retention_seconds: float = 3600) -> None:
        self._scripts = Scripts(client, retention_seconds=retention_seconds)

    def take(self, max_webhooks: int, *, silence_seconds: float) -> list[Undelivered]:
        """Take up to `max_webhooks` that are due. Each belongs to this caller until it reports the result, or
        until `silence_seconds` pass without a renewal.
        """
        rows = self._scripts.run("outbox/take", max_webhooks, round(silence_seconds * 1000))
        return [_undelivered(*row) for row in rows]

    def renew(self, entry_ids: Sequence[str]) -> None:
        """Keep webhooks: `silence_seconds` start anew."""
        if entry_ids:
            self._scripts.run("outbox/renew", *entry_ids)

    def done(self, webhook: Undelivered, attempt: Attempt) -> None:
        """Remove a webhook that was delivered, or given up after an attempt that failed.

        Its task is kept for at least another minute.
        """
        state = "failed" if attempt.error else "delivered"
        self._scripts.run("outbox/done", webhook.entry_id, webhook.task_id, state, *attempt.texts)

    def retry(self, webhook: Undelivered, seconds: float, failed: Attempt | None = None) -> None:
        """Retry in `seconds`. `failed`: the attempt that is counted; None: none was made.

        No effect if another deliverer has taken the webhook.
        """
        texts = failed.texts if failed else ("", "")
        is_counted = int(failed is not None)
        self._scripts.run("outbox/retry", webhook.entry_id, webhook.task_id, seconds, is_counted, *texts)


def _undelivered(*row: bytes) -> Undelivered:
    entry_id, task_id, url, tries, tenant = (value.decode() for value in row)
    return Undelivered(entry_id=entry_id, task_id=task_id, url=url, tries=int(tries), tenant=tenant)
