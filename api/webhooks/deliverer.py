"""Delivers webhooks: takes due ones from the outbox in Redis, posts them, and retries those that failed.

A webhook leaves the outbox when it has been delivered or `MAX_TRIES` tries have failed. If a deliverer dies
in between, another one takes over, so a receiver may get a webhook twice, with the same id and body.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Protocol

import redis
import structlog

from api.schemas.task_view import view
from api.schemas.webhook_url import Target, parse_url
from api.webhooks import signature
from api.webhooks.http_post import PostFailed
from api.webhooks.receiver_limits import ReceiverLimits
from monitoring.webhooks import WebhookMetrics
from tokenmill.protocol.snapshots import Reading
from tokenmill.protocol.store.outbox import Attempt, Outbox, Undelivered
from tokenmill.protocol.store.task_store import TaskStore

_log = structlog.get_logger(__name__)

RETRY_DELAYS = (5.0, 60.0, 600.0, 3600.0, 10_800.0, 28_800.0, 43_200.0)
"""Seconds after each failed try. The last of eight tries is made about a day after the first."""
MAX_TRIES = len(RETRY_DELAYS) + 1
JITTER = 0.1
"""Delays are lengthened by up to this share, so that webhooks that failed together are spread."""
BUSY_SECONDS = 1.0
"""Delay of a webhook whose receiver or tenant is at its limit."""
SILENT_SECONDS = 5.0
"""The same where the receiver did not answer its last call."""
MAX_CONCURRENT = 16
"""Deliveries in progress at once."""
LEASE_SECONDS = 10.0
"""Lease of a webhook that is being delivered. Another deliverer takes over one that is not renewed."""
RENEW_SECONDS = 2.0
"""Interval between renewals: three may fail in a row."""


class Sender(Protocol):
    """The methods of `Poster` that are used here."""

    def addresses(self, target: Target) -> Sequence[str]: ...

    def post(
        self, target: Target, headers: Mapping[str, str], body: bytes, addresses: Sequence[str]
    ) -> int: ...


class Deliverer:
    """Delivers due webhooks, up to `MAX_CONCURRENT` at once, each in its own thread.

    `max_per_tenant`: concurrent deliveries of one tenant. `jitter`: returns a number from 0 to 1. `now`:
    seconds since the epoch, by the clock that receivers compare with.
    """

    # More parameters than usual: tests replace each of these parts.
    def __init__(
        self,
        outbox: Outbox,
        store: TaskStore,
        sender: Sender,
        keys: Sequence[bytes],
        metrics: WebhookMetrics,
        *,
        max_per_tenant: int = MAX_CONCURRENT,
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
        self._slots = threading.Semaphore(MAX_CONCURRENT)
        self._limits = ReceiverLimits(max_per_tenant)
        self._leased: dict[str, Undelivered] = {}

    def deliver_due(self) -> int:
        """Start delivering what is due. Returns the number of webhooks that were looked at.

        Waits until at least one more delivery may start. Raises Redis errors; webhooks that were not started
        then return when their leases expire.
        """
        num_slots = self._acquire_slots()
        try:
            due = self._outbox.take(num_slots, silence_seconds=LEASE_SECONDS)
            for webhook in due:
                if self._start(webhook):
                    # Its thread releases the slot.
                    num_slots -= 1
        finally:
            if num_slots:
                self._slots.release(num_slots)
        return len(due)

    def _acquire_slots(self) -> int:
        self._slots.acquire()
        num_slots = 1
        while num_slots < MAX_CONCURRENT and self._slots.acquire(blocking=False):
            num_slots += 1
        return num_slots

    def renew_leases(self) -> None:
        """Renew the leases of all webhooks in delivery, every `RENEW_SECONDS`. Raises Redis errors."""
        self._outbox.renew(list(self._leased))

    def wait_idle(self) -> None:
        """Wait until no delivery is in progress. Do not call it beside `deliver_due`."""
        for _ in range(MAX_CONCURRENT):
            self._slots.acquire()
        self._slots.release(MAX_CONCURRENT)

    @property
    def num_leased(self) -> int:
        """Webhooks in delivery."""
        return len(self._leased)

    def _start(self, webhook: Undelivered) -> bool:
        if not self._limits.enter_tenant(webhook.tenant):
            self._postpone(webhook, BUSY_SECONDS)
            return False
        self._leased[webhook.entry_id] = webhook
        try:
            threading.Thread(target=self._run, args=(webhook,), name="webhook", daemon=True).start()
        except RuntimeError:
            # The process has too many threads. The lease expires unless it is renewed.
            self._leave(webhook)
            raise
        return True

    def _postpone(self, webhook: Undelivered, seconds: float) -> None:
        """Return a webhook to the outbox without counting a try."""
        self._leased.pop(webhook.entry_id, None)
        self._outbox.retry(webhook, self._with_jitter(seconds))

    def _leave(self, webhook: Undelivered) -> None:
        self._leased.pop(webhook.entry_id, None)
        self._limits.leave_tenant(webhook.tenant)

    def _run(self, webhook: Undelivered) -> None:
        try:
            self.deliver(webhook)
        except redis.RedisError as error:
            _log.warning("cannot store the outcome of a webhook", task=webhook.task_id, error=str(error))
        except Exception:  # noqa: BLE001 - it is logged
            # The webhook stays leased, and returns when its lease expires.
            _log.exception("webhook: internal error", task=webhook.task_id)
        finally:
            self._leave(webhook)
            self._slots.release()

    def deliver(self, webhook: Undelivered) -> None:
        """Try once and store the outcome. After a Redis error the webhook returns to the outbox."""
        target = parse_url(webhook.url)
        reading = self._store.read(webhook.task_id)
        if reading is None:
            # The task was deleted by other tools.
            self._outbox.done(webhook, Attempt(None, "the task was deleted"))
            return
        try:
            addresses = self._sender.addresses(target)
        except PostFailed as error:
            self._fail(webhook, target, Attempt(None, str(error)))
            return
        if not self._limits.enter(addresses):
            is_silent = self._limits.is_silent(addresses)
            self._postpone(webhook, SILENT_SECONDS if is_silent else BUSY_SECONDS)
            return
        answered = False
        try:
            attempt = self._try(reading, target, addresses)
            answered = attempt.status is not None
        finally:
            self._limits.leave(addresses, answered=answered)
        if attempt.error:
            self._fail(webhook, target, attempt)
        else:
            self._outbox.done(webhook, attempt)
            self._metrics.delivered()
            _log.info(
                "webhook delivered",
                task=webhook.task_id,
                request_id=reading.snapshot.request_id,
                host=target.host,
            )

    def _try(self, reading: Reading, target: Target, addresses: Sequence[str]) -> Attempt:
        body = event(reading)
        signed = signature.headers(self._keys, f"msg_{reading.snapshot.task_id}", int(self._now()), body)
        headers = {"Content-Type": "application/json", "User-Agent": "Tokenmill", **signed}
        if request_id := reading.snapshot.request_id:
            headers["X-Request-ID"] = request_id
        try:
            status = self._sender.post(target, headers, body, addresses)
        except PostFailed as error:
            return Attempt(None, str(error))
        return Attempt(status) if 200 <= status < 300 else Attempt(status, f"status {status}")

    def _fail(self, webhook: Undelivered, target: Target, attempt: Attempt) -> None:
        # Logs name only the host of the URL: the rest may hold a secret.
        # Standard Webhooks: 410 asks the sender to stop.
        if attempt.status == HTTPStatus.GONE or webhook.tries + 1 >= MAX_TRIES:
            self._outbox.done(webhook, attempt)
            self._metrics.given_up()
            _log.warning("webhook given up", task=webhook.task_id, host=target.host, reason=attempt.error)
            return
        delay = self._with_jitter(RETRY_DELAYS[webhook.tries])
        self._outbox.retry(webhook, delay, attempt)
        self._metrics.failed()
        _log.info(
            "webhook failed",
            task=webhook.task_id,
            host=target.host,
            next_try_seconds=round(delay),
            reason=attempt.error,
        )

    def _with_jitter(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._jitter())


def event(reading: Reading) -> bytes:
    """The body of a webhook, the same at each try. `data` is the task as a poll returns it."""
    snapshot = reading.snapshot
    ended_at = datetime.fromtimestamp(snapshot.finished_at or snapshot.now, UTC)
    timestamp = ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = f'{{"type":"task.{snapshot.status}","timestamp":"{timestamp}","data":'
    # Without the state of its own delivery, which changes with each try.
    task = view(reading).model_copy(update={"webhook": None})
    return f"{head}{task.model_dump_json()}}}".encode()
