"""The threads that a server has beside its calls. One ends what waits too long, also while no worker is up,
and puts back what a dead worker left; the other has webhooks delivered.

Law: they decide nothing. When a task is overdue, a lease has lapsed or a webhook is due is for Redis to say.
"""

import logging
import threading

import redis

from api.auditor import start_auditor
from api.presence import Shutdown
from api.redis_clients import connect
from api.settings import ApiSettings
from api.webhook_post import Poster
from api.webhooks import MAX_AT_ONCE, RENEW_SECONDS, Deliverer
from monitoring.webhooks import WebhookMetrics
from worker.protocol.outbox import Outbox
from worker.protocol.store import TaskStore

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Before the first time, so that workers that start with this process come back for their tasks."""
PERIOD_SECONDS = 1.0
"""No more than so late a task ends whose limit has passed."""
PAUSE_SECONDS = 60.0
"""After an outage, so that workers that live can renew their leases before anyone calls them lapsed."""

WEBHOOK_PERIOD_SECONDS = 1.0
WEBHOOK_PAUSE_SECONDS = 5.0


def start_reaper(settings: ApiSettings) -> None:
    """Start the reaper and the auditor of the indexes; the threads end with the process."""
    start_auditor(settings)
    store = TaskStore(connect(settings.redis_url), retention_seconds=settings.retention_seconds)
    threading.Thread(target=_reap_for_ever, args=(settings, store), name="reaper", daemon=True).start()


def reap(settings: ApiSettings, store: TaskStore) -> float:
    """Reap once; gives the seconds until the next time."""
    try:
        reaped = store.reap(settings.slug, max_task_seconds=settings.max_task_seconds)
    except redis.RedisError as error:
        logger.warning("overdue tasks cannot be looked for: %s", error)
        return PAUSE_SECONDS
    if reaped.timed_out or reaped.returned:
        logger.info(
            "%d tasks waited too long, %d were taken back from dead workers",
            len(reaped.timed_out),
            len(reaped.returned),
        )
    return PERIOD_SECONDS


def _reap_for_ever(settings: ApiSettings, store: TaskStore) -> None:
    pause = threading.Event()
    seconds = START_SECONDS
    while not pause.wait(seconds):
        seconds = reap(settings, store)


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
        logger.warning("webhooks cannot be looked for: %s", error)
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
