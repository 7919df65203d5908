"""Metrics of webhook deliveries by the API."""

from prometheus_client import CollectorRegistry

from monitoring.families import Families

OUTCOMES = ("delivered", "failed", "given_up")


class WebhookMetrics:
    """Delivery attempts by outcome. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Families(registry).counters(
            "webhook_deliveries_total", "Attempts to deliver a webhook, by outcome.", "outcome", OUTCOMES
        )

    def delivered(self) -> None:
        self._attempts["delivered"].inc()

    def failed(self) -> None:
        """The attempt failed and will be repeated."""
        self._attempts["failed"].inc()

    def given_up(self) -> None:
        """The last attempt failed."""
        self._attempts["given_up"].inc()
