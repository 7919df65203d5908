"""The door to the webhooks that wait for their delivery in Redis: each method is one script.

A webhook is put there by the transaction that ends its task. Law: it leaves only as delivered or given up;
one whose deliverer died comes back. Knows neither how to deliver nor how often to try.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.protocol.store.scripting import RedisClient, Scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class Undelivered:
    """A webhook in a deliverer's hands. `tries`: those that have failed before. `tenant`: of its task."""

    entry_id: str
    task_id: str
    url: str
    tries: int
    tenant: str


class Outbox:
    """Webhooks of one Redis database. `client` and `retention_seconds`: as the task store's.

    Every method may raise the client's connection errors; calling it again with the same arguments is safe.
    """

    def __init__(self, client: RedisClient, *, retention_seconds: float = 3600) -> None:
        self._scripts = Scripts(client, retention_seconds=retention_seconds)

    def take(self, max_webhooks: int, *, silence_seconds: float) -> list[Undelivered]:
        """Those that are to be tried now. Each is this caller's until it tells how that went, or has been
        silent for `silence_seconds`.
        """
        rows = self._scripts.run("outbox_take", max_webhooks, round(silence_seconds * 1000))
        return [_undelivered(*row) for row in rows]

    def renew(self, entry_ids: Sequence[str]) -> None:
        """Keep webhooks in their deliverer's hands: its silence counts from now on."""
        if entry_ids:
            self._scripts.run("outbox_renew", *entry_ids)

    def done(self, webhook: Undelivered) -> None:
        """It was delivered or given up. Its task expires as others do, but not within the next minute."""
        self._scripts.run("outbox_done", webhook.entry_id, webhook.task_id)

    def retry(self, webhook: Undelivered, seconds: float, *, counted: bool = True) -> None:
        """Try it again in so many seconds. `counted`: this was a try. Does nothing if it is another's now."""
        self._scripts.run("outbox_retry", webhook.entry_id, webhook.task_id, seconds, int(counted))


def _undelivered(*row: bytes) -> Undelivered:
    entry_id, task_id, url, tries, tenant = (value.decode() for value in row)
    return Undelivered(entry_id=entry_id, task_id=task_id, url=url, tries=int(tries), tenant=tenant)
