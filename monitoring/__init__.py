"""Prometheus metrics of the API, the worker and the engine. Observes the service and never controls it."""
