"""What the API tells of its webhooks. Knows none."""

from prometheus_client import CollectorRegistry

from monitoring.families import Families

OUTCOMES = ("delivered", "failed", "given_up")


class WebhookMetrics:
    """Tries to deliver one. Every verb may be called from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tries = Families(registry).counters(
            "webhook_deliveries_total", "Tries to deliver a webhook, by how they went.", "outcome", OUTCOMES
        )

    def delivered(self) -> None:
        self._tries["delivered"].inc()

    def failed(self) -> None:
        """It is tried again."""
        self._tries["failed"].inc()

    def given_up(self) -> None:
        """It failed for the last time."""
        self._tries["given_up"].inc()
