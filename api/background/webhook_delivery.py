"""Threads that deliver webhooks and renew the leases of those in delivery."""

import threading

import redis
import structlog

from api.background.periodic import start_periodic
from api.redis_clients import connect, is_unavailable
from api.shutdown import Shutdown
from api.webhooks.deliverer import MAX_CONCURRENT, RENEW_SECONDS, Deliverer
from api.webhooks.http_post import Poster
from monitoring.webhooks import WebhookMetrics
from tokenmill.protocol.store.outbox import Outbox
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

_log = structlog.get_logger(__name__)

PERIOD_SECONDS = 1.0
"""Interval between checks of an empty outbox."""
RETRY_SECONDS = 5.0
"""Interval after an error."""


def start_webhook_delivery(settings: ApiSettings, metrics: WebhookMetrics, shutdown: Shutdown) -> None:
    """Start the threads if webhooks are enabled.

    Leases are renewed until the process ends: deliveries in progress are finished while the server stops.
    """
    if not settings.webhook_keys:
        return
    client = connect(settings.redis_url)
    deliverer = Deliverer(
        Outbox(client, retention_seconds=settings.retention_seconds),
        TaskStore(client, retention_seconds=settings.retention_seconds),
        Poster(allow_private=settings.webhook_allow_private),
        settings.webhook_keys,
        metrics,
        max_per_tenant=MAX_CONCURRENT // 2 if settings.keyring.has_several_tenants else MAX_CONCURRENT,
    )
    start_periodic("webhook-leases", lambda: renew_leases(deliverer))
    threading.Thread(target=_deliver_until, args=(shutdown, deliverer), name="webhooks", daemon=True).start()


def deliver_due(deliverer: Deliverer) -> float:
    """Start the deliveries that are due. Returns the seconds until the next call. Raises nothing."""
    try:
        return 0.0 if deliverer.deliver_due() else PERIOD_SECONDS
    except Exception as error:  # noqa: BLE001 - it is logged
        # The client has logged an outage.
        if not is_unavailable(error):
            _log.exception("cannot deliver webhooks; will retry")
        return RETRY_SECONDS


def renew_leases(deliverer: Deliverer) -> float:
    """Renew the leases once. Returns the seconds until the next call. Raises no error of an outage."""
    try:
        deliverer.renew_leases()
    except redis.RedisError as error:
        # The client has logged an outage.
        if not is_unavailable(error):
            raise
    return RENEW_SECONDS


def _deliver_until(shutdown: Shutdown, deliverer: Deliverer) -> None:
    pause = threading.Event()
    while not shutdown.requested:
        pause.wait(deliver_due(deliverer))
