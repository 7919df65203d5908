"""The worker's metrics port."""

import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from monitoring.http import MetricsServer, serve_metrics


class Readiness:
    is_ready = True

    def __call__(self) -> bool:
        return self.is_ready


@pytest.fixture
def ready() -> Readiness:
    return Readiness()


@pytest.fixture
def server(ready: Readiness) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("tokenmill_answer", "A number.", registry=registry).set(42)
    server = serve_metrics(registry, "127.0.0.1", 0, ready)
    yield server
    server.close()


def call(server: MetricsServer, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def test_metrics_are_served(server: MetricsServer) -> None:
    status, headers, body = call(server, "GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"tokenmill_answer 42.0" in body


def test_a_query_string_is_ignored(server: MetricsServer) -> None:
    assert call(server, "GET", "/metrics?name[]=x")[0] == 200


def test_head_returns_the_length_without_a_body(server: MetricsServer) -> None:
    body = call(server, "GET", "/metrics")[2]
    status, headers, nothing = call(server, "HEAD", "/metrics")
    assert (status, headers["Content-Length"], nothing) == (200, str(len(body)), b"")


def test_readiness_follows_the_worker_and_liveness_does_not(server: MetricsServer, ready: Readiness) -> None:
    assert call(server, "GET", "/readyz")[0] == 200
    ready.is_ready = False
    assert call(server, "GET", "/readyz")[0] == 503
    assert call(server, "GET", "/livez")[0] == 200


def test_other_paths_and_methods_are_errors(server: MetricsServer) -> None:
    assert call(server, "GET", "/")[0] == 404
    assert call(server, "POST", "/metrics")[0] == 501


def test_a_silent_client_does_not_block_others(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        assert call(server, "GET", "/livez")[0] == 200


def test_an_error_of_a_collector_fails_one_scrape_and_is_logged(
    ready: Readiness, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def collect(self) -> Iterator[None]:
            raise RuntimeError("a fault")

    registry = CollectorRegistry()
    registry.register(Broken())  # type: ignore[arg-type]  # a broken collector
    server = serve_metrics(registry, "127.0.0.1", 0, ready)
    try:
        with pytest.raises(http.client.HTTPException):
            call(server, "GET", "/metrics")
        assert call(server, "GET", "/livez")[0] == 200
        assert "a fault" in caplog.text
    finally:
        server.close()


def test_a_port_in_use_is_an_error(server: MetricsServer, ready: Readiness) -> None:
    with pytest.raises(OSError, match="in use"):
        serve_metrics(CollectorRegistry(), "127.0.0.1", server.port, ready)


def test_after_close_the_port_is_free(ready: Readiness) -> None:
    server = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, ready)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        call(server, "GET", "/livez")
    serve_metrics(CollectorRegistry(), "127.0.0.1", server.port, ready).close()
