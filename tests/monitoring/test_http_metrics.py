"""Metrics of the API's HTTP calls. No client can create a series."""

import secrets

import pytest
from prometheus_client import CollectorRegistry

from monitoring.http import HttpMetrics, expose


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> HttpMetrics:
    return HttpMetrics(registry)


def num_series(registry: CollectorRegistry) -> int:
    return sum(line[0] != "#" for line in expose(registry)[0].decode().splitlines())


def test_a_call_is_counted_by_route_method_and_status(
    registry: CollectorRegistry, metrics: HttpMetrics
) -> None:
    metrics.observe("/v1/tasks", "POST", 202, 0.02)
    metrics.observe("/v1/tasks", "POST", 202, 0.03)
    metrics.observe("/v1/tasks", "POST", 429, 0.01)
    call = {"route": "/v1/tasks", "method": "POST"}
    assert registry.get_sample_value("tokenmill_http_requests_total", {**call, "status": "202"}) == 2
    assert registry.get_sample_value("tokenmill_http_requests_total", {**call, "status": "429"}) == 1
    duration = registry.get_sample_value("tokenmill_http_request_duration_seconds_sum", call)
    assert duration == pytest.approx(0.06)


def test_unknown_paths_and_methods_create_one_series(
    registry: CollectorRegistry, metrics: HttpMetrics
) -> None:
    """litellm#35666, otari#264: raw paths and ids as label values created a series for each call."""
    metrics.observe(None, "GET", 404, 0.01)
    before = num_series(registry)
    for _ in range(500):
        metrics.observe(None, "GET", 404, 0.01)
        metrics.observe(None, secrets.token_hex(4).upper(), 404, 0.01)
    one_call = registry.get_sample_value(
        "tokenmill_http_requests_total", {"route": "unmatched", "method": "other", "status": "404"}
    )
    assert one_call == 500
    # The counter, and the histogram's buckets, sum and count, of the method `other`.
    assert num_series(registry) - before == 1 + 23 + 2


def test_open_streams_are_counted(registry: CollectorRegistry, metrics: HttpMetrics) -> None:
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    assert registry.get_sample_value("tokenmill_http_streams_open") == 1


def test_the_exposition_has_no_creation_times(registry: CollectorRegistry, metrics: HttpMetrics) -> None:
    metrics.observe("/livez", "GET", 200, 0.001)
    body, content_type = expose(registry)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b"tokenmill_http_requests_total{" in body
    assert b"_created" not in body


def test_a_scrape_does_not_change_what_the_next_one_sees(
    registry: CollectorRegistry, metrics: HttpMetrics
) -> None:
    metrics.observe("/livez", "GET", 200, 0.001)
    assert expose(registry) == expose(registry)
