"""The threads that a server has beside its calls. One ends what waits too long, also while no worker is up,
and puts back what a dead worker left; one has webhooks delivered; one checks how Redis is set up.

Law: they decide nothing. When a task is overdue, a lease has lapsed or a webhook is due is for Redis to say.
No exception ends one of them.
"""

import logging
import threading
import time
from collections.abc import Callable

import redis

from api.redis_checks import RedisChecks
from api.redis_clients import connect
from api.settings import ApiSettings
from api.streams.presence import Shutdown
from api.webhooks.deliverer import MAX_AT_ONCE, RENEW_SECONDS, Deliverer
from api.webhooks.post import Poster
from monitoring.reaper import ReapFailures
from monitoring.webhooks import WebhookMetrics
from tokenmill.protocol.store.outbox import Outbox
from tokenmill.protocol.store.task_store import TaskStore

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Before leases count as lapsed at first, so that workers that start with this process come back for their
tasks.
"""
PERIOD_SECONDS = 1.0
"""No more than so late a task ends whose limit has passed."""
PAUSE_SECONDS = 60.0
"""Before leases count as lapsed after an outage, so that workers that live can renew them. Limits of time
count from the end of the outage on.
"""

WEBHOOK_PERIOD_SECONDS = 1.0
WEBHOOK_PAUSE_SECONDS = 5.0


class Reaper:
    """Ends what is overdue and takes back what dead workers left. `clock`: seconds that never go back."""

    def __init__(
        self,
        settings: ApiSettings,
        store: TaskStore,
        failures: ReapFailures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._failures = failures
        self._clock = clock
        self._take_back_after = clock() + START_SECONDS
        # Since the last run that worked.
        self._failed_at: float | None = None

    def run(self) -> float:
        """Reap once; returns the seconds until the next time. Raises nothing."""
        try:
            self._reap()
        except redis.RedisError as error:
            # The client has logged the outage.
            logger.debug("overdue tasks cannot be looked for: %s", error)
            self._failed_at = self._clock()
            self._take_back_after = self._failed_at + PAUSE_SECONDS
        except Exception:
            self._failures.failed("reaper")
            logger.exception("the reaper failed and goes on")
        return PERIOD_SECONDS

    def _reap(self) -> None:
        now = self._clock()
        reaped = self._store.reap(
            self._settings.slug,
            max_task_seconds=self._settings.max_task_seconds,
            reclaim_leases=now >= self._take_back_after,
            failed_seconds_ago=None if self._failed_at is None else now - self._failed_at,
        )
        self._failed_at = None
        for failure in reaped.failures:
            self._failures.failed(failure.duty)
            logger.error("reaper, %s: %s is set aside: %s", *failure)
        if reaped.lost:
            logger.error("ended, as Redis lost keys of them: %s", ", ".join(reaped.lost))
        if reaped.timed_out or reaped.returned:
            logger.info(
                "%d tasks waited too long, %d were taken back from dead workers",
                len(reaped.timed_out),
                len(reaped.returned),
            )


def start_reaper(settings: ApiSettings, failures: ReapFailures) -> None:
    """Start the thread; it ends with the process."""
    store = TaskStore(connect(settings.redis_url), retention_seconds=settings.retention_seconds)
    _start("reaper", Reaper(settings, store, failures).run)


def start_checks(checks: RedisChecks) -> None:
    """Start the thread; it ends with the process."""
    _start("redis-checks", checks.check)


def _start(name: str, turn: Callable[[], float]) -> threading.Thread:
    """`turn` returns the seconds until the next turn."""

    def run() -> None:
        pause = threading.Event()
        while True:
            try:
                seconds = turn()
            except Exception:
                logger.exception("the %s failed and goes on", name)
                seconds = PERIOD_SECONDS
            pause.wait(seconds)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def start_deliverer(settings: ApiSettings, metrics: WebhookMetrics, shutdown: Shutdown) -> None:
    """Start the thread, if this service signs webhooks; it ends with the process."""
    if not settings.webhook_keys:
        return
    client = connect(settings.redis_url)
    deliverer = Deliverer(
        Outbox(client, retention_seconds=settings.retention_seconds),
        TaskStore(client, retention_seconds=settings.retention_seconds),
        Poster(allow_private=settings.webhook_allow_private),
        settings.webhook_keys,
        metrics,
        max_per_tenant=MAX_AT_ONCE // 2 if settings.keyring.has_several_tenants else MAX_AT_ONCE,
    )
    threading.Thread(target=_renew_for_ever, args=(deliverer,), name="webhook-leases", daemon=True).start()
    threading.Thread(target=_deliver_until, args=(shutdown, deliverer), name="webhooks", daemon=True).start()


def deliver(deliverer: Deliverer) -> float:
    """Begin what is due; gives the seconds until the next time."""
    try:
        return 0.0 if deliverer.deliver_due() else WEBHOOK_PERIOD_SECONDS
    except redis.RedisError as error:
        # The client has logged the outage.
        logger.debug("webhooks cannot be looked for: %s", error)
    except Exception:
        # Without this thread nobody would be told any more, and nobody would know.
        logger.exception("webhooks cannot be delivered")
    return WEBHOOK_PAUSE_SECONDS


def _renew_for_ever(deliverer: Deliverer) -> None:
    """Also while the server stops: deliveries in progress are ended first."""
    pause = threading.Event()
    is_renewed = True
    while not pause.wait(RENEW_SECONDS):
        try:
            deliverer.renew_held()
            is_renewed = True
        except redis.RedisError as error:
            if is_renewed:
                logger.warning("leases of webhooks cannot be renewed: %s", error)
            is_renewed = False


def _deliver_until(shutdown: Shutdown, deliverer: Deliverer) -> None:
    pause = threading.Event()
    while not shutdown.requested:
        pause.wait(deliver(deliverer))
