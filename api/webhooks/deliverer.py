"""Delivers webhooks: takes those that wait in Redis, tells their receivers, and keeps or drops what is left.

Law: a webhook leaves the outbox once it was received or `MAX_TRIES` tries have failed. A deliverer that dies
in between leaves it to another, so a receiver may hear twice, with the same `webhook-id` and the same body.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import NamedTuple, Protocol

import redis

from api.schemas.task_view import view
from api.schemas.webhook_url import Target, parse_url
from api.webhooks import signature as webhook_signature
from api.webhooks.post import PostFailed
from api.webhooks.receivers import Receivers
from monitoring.webhooks import WebhookMetrics
from tokenmill.protocol.snapshots import Reading
from tokenmill.protocol.store.outbox import Outbox, Undelivered
from tokenmill.protocol.store.task_store import TaskStore

logger = logging.getLogger(__name__)

DELAYS = (5.0, 60.0, 600.0, 3600.0, 10_800.0, 28_800.0, 43_200.0)
"""Seconds after each failed try: the last of eight is made about a day after the first."""
MAX_TRIES = len(DELAYS) + 1
JITTER = 0.1
"""Delays are longer by up to this share, so that what failed together does not come back together."""
BUSY_SECONDS = 1.0
"""A webhook whose receiver or tenant occupies enough deliveries is looked at again after this time."""
SILENT_SECONDS = 5.0
"""The same where the receiver did not answer its last call."""
MAX_AT_ONCE = 16
SILENCE_SECONDS = 10.0
"""Lease of a webhook in a deliverer's hands: without a renewal in this time another takes it over."""
RENEW_SECONDS = 2.0
"""Between two renewals of the leases: three may fail."""


class Sender(Protocol):
    """What is asked of a `Poster`."""

    def addresses(self, target: Target) -> Sequence[str]: ...

    def post(
        self, target: Target, headers: Mapping[str, str], body: bytes, addresses: Sequence[str] | None = None
    ) -> int: ...


class Deliverer:
    """Delivers what is due, several at a time.

    `max_per_tenant`: deliveries of one tenant at once. `jitter`: gives a number from 0 to 1. `now`: seconds
    since the epoch, as receivers have them.
    """

    def __init__(
        self,
        outbox: Outbox,
        store: TaskStore,
        sender: Sender,
        keys: Sequence[bytes],
        metrics: WebhookMetrics,
        *,
        max_per_tenant: int = MAX_AT_ONCE,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = outbox
        self._store = store
        self._sender = sender
        self._keys = keys
        self._metrics = metrics
        self._jitter = jitter
        self._now = now
        self._places = threading.Semaphore(MAX_AT_ONCE)
        self._receivers = Receivers(max_per_tenant)
        self._held: dict[str, Undelivered] = {}

    def deliver_due(self) -> int:
        """Begin to deliver what is due, as far as there is room, each in a thread of its own; gives how many
        were looked at. Waits for room for one at least. Raises Redis's errors.
        """
        places = self._take_places()
        try:
            due = self._outbox.take(places, silence_seconds=SILENCE_SECONDS)
            self._held.update({webhook.entry_id: webhook for webhook in due})
            for webhook in due:
                if self._begin(webhook):
                    # Given back by that thread.
                    places -= 1
        finally:
            if places:
                self._places.release(places)
        return len(due)

    def _take_places(self) -> int:
        self._places.acquire()
        places = 1
        while places < MAX_AT_ONCE and self._places.acquire(blocking=False):
            places += 1
        return places

    def renew_held(self) -> None:
        """Renew the leases of all webhooks in hand; call each `RENEW_SECONDS`. Raises Redis's errors."""
        self._outbox.renew(list(self._held))

    def _begin(self, webhook: Undelivered) -> bool:
        if not self._receivers.enter_tenant(webhook.tenant):
            self._put_off(webhook, BUSY_SECONDS)
            return False
        threading.Thread(target=self._run, args=(webhook,), name="webhook", daemon=True).start()
        return True

    def _put_off(self, webhook: Undelivered, seconds: float) -> None:
        self._held.pop(webhook.entry_id, None)
        self._outbox.retry(webhook, self._spread(seconds), counted=False)

    def _run(self, webhook: Undelivered) -> None:
        try:
            self.deliver(webhook)
        except redis.RedisError as error:
            logger.warning("webhook of task %s: how it went cannot be kept: %s", webhook.task_id, error)
        except Exception:
            # It stays taken, and comes back when nothing was heard of it for long enough.
            logger.exception("webhook of task %s: a fault of this service", webhook.task_id)
        finally:
            self._held.pop(webhook.entry_id, None)
            self._receivers.leave_tenant(webhook.tenant)
            self._places.release()

    def deliver(self, webhook: Undelivered) -> None:
        """Try once and tell Redis how that went. After an error of Redis's the webhook comes back."""
        target = parse_url(webhook.url)
        reading = self._store.read(webhook.task_id)
        if reading is None:
            # Deleted by hand.
            self._outbox.done(webhook)
            return
        try:
            addresses = self._sender.addresses(target)
        except PostFailed as error:
            self._fail(webhook, target, _Failure(str(error)))
            return
        if not self._receivers.enter(addresses):
            is_silent = self._receivers.is_silent(addresses)
            self._put_off(webhook, SILENT_SECONDS if is_silent else BUSY_SECONDS)
            return
        # Only a receiver that was called and did not answer is one that does not answer.
        answered = False
        try:
            failure = self._try(reading, target, addresses)
            answered = failure is None or failure.answered
        finally:
            self._receivers.leave(addresses, answered=answered)
        if failure is None:
            self._outbox.done(webhook)
            self._metrics.delivered()
        else:
            self._fail(webhook, target, failure)

    def _try(self, reading: Reading, target: Target, addresses: Sequence[str]) -> "_Failure | None":
        body = event(reading)
        signed = webhook_signature.headers(
            self._keys, f"msg_{reading.snapshot.task_id}", int(self._now()), body
        )
        headers = {"Content-Type": "application/json", "User-Agent": "Tokenmill", **signed}
        try:
            status = self._sender.post(target, headers, body, addresses)
        except PostFailed as error:
            return _Failure(str(error))
        if 200 <= status < 300:
            return None
        # 410 is how a receiver says that it wants no more.
        return _Failure(f"it answered {status}", answered=True, for_good=status == HTTPStatus.GONE)

    def _fail(self, webhook: Undelivered, target: Target, failure: "_Failure") -> None:
        # Of the URL only the host is told: the rest may hold a secret.
        if failure.for_good or webhook.tries + 1 >= MAX_TRIES:
            self._outbox.done(webhook)
            self._metrics.given_up()
            logger.warning(
                "webhook of task %s to %s is given up: %s", webhook.task_id, target.host, failure.reason
            )
            return
        delay = self._spread(DELAYS[webhook.tries])
        self._outbox.retry(webhook, delay)
        self._metrics.failed()
        logger.info(
            "webhook of task %s to %s failed, again in %.0f s: %s",
            webhook.task_id,
            target.host,
            delay,
            failure.reason,
        )

    def _spread(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._jitter())


class _Failure(NamedTuple):
    """`answered`: with a status. `for_good`: it need not be tried again."""

    reason: str
    answered: bool = False
    for_good: bool = False


def event(reading: Reading) -> bytes:
    """The body that tells of a task's end, the same at each try. `data` is the task as polling shows it."""
    snapshot = reading.snapshot
    ended_at = datetime.fromtimestamp(snapshot.finished_at or snapshot.now, UTC)
    timestamp = ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = f'{{"type":"task.{snapshot.status}","timestamp":"{timestamp}","data":'
    return f"{head}{view(reading).model_dump_json()}}}".encode()
