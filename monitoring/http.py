"""Metrics of the API's HTTP calls, and the HTTP server that exposes a process's registry.

Invariant: no label value comes from a client.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from monitoring.families import PREFIX, TIME_BUCKETS, Families

logger = logging.getLogger(__name__)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SILENCE_SECONDS = 5.0
"""A connection to the metrics port is closed after this time without data."""


class HttpMetrics:
    """The API's HTTP calls. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            f"{PREFIX}http_requests_total",
            "Calls answered, by route, method and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "Time until a call was answered. For a stream, until it began.",
            ("route", "method"),
            registry=registry,
            buckets=TIME_BUCKETS,
        )
        self._streams = Families(registry).gauge("http_streams_open", "Event streams open now.")

    def observe(self, route: str | None, method: str, status: int, seconds: float) -> None:
        """Count a call that was answered.

        `route`: the matching template, such as `/v1/tasks/<task_id>`, or None. An unknown method counts as
        `other`.
        """
        known_route = route or "unmatched"
        known_method = method if method in METHODS else "other"
        self._requests.labels(known_route, known_method, str(status)).inc()
        self._seconds.labels(known_route, known_method).observe(seconds)

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()


class _WithoutCreated(Collector):
    """A registry without the unused `_created` times, which double the number of series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            created = f"{metric.name}_created"
            metric.samples = [sample for sample in metric.samples if sample.name != created]
            yield metric


def expose(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Body and content type of the reply to a scrape, in Prometheus's text format."""
    return generate_latest(_WithoutCreated(registry)), CONTENT_TYPE_PLAIN_0_0_4


class MetricsServer:
    """A running metrics server. `port`: the actual port if 0 was requested."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = server.server_port

    def close(self) -> None:
        """Stop listening, without waiting for calls in progress. Can be called twice."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, ready: Callable[[], bool]
) -> MetricsServer:
    """Serve `/metrics`, `/livez` and `/readyz` in a thread. Port 0 takes any free port.

    `/readyz` returns 503 while `ready()` is false. Raises OSError if the address cannot be used.
    """
    return MetricsServer(_Server((host, port), partial(_Handler, registry, ready)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        if isinstance(sys.exception(), OSError):
            logger.debug("metrics port: a client disconnected", exc_info=True)
        else:
            logger.exception("metrics port: a call failed")


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENCE_SECONDS

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool], *args: Any) -> None:
        # Before the base class, whose constructor handles the whole call.
        self._registry = registry
        self._ready = ready
        super().__init__(*args)

    def do_GET(self) -> None:
        status, body, content_type = self._answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the base class finds it by this name

    def _answer(self, path: str) -> tuple[HTTPStatus, bytes, str]:
        text = "text/plain; charset=utf-8"
        if path == "/metrics":
            return HTTPStatus.OK, *expose(self._registry)
        if path == "/livez":
            return HTTPStatus.OK, b"alive\n", text
        if path == "/readyz":
            ready = self._ready()
            status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
            return status, b"ready\n" if ready else b"not ready\n", text
        return HTTPStatus.NOT_FOUND, b"see /metrics, /livez, /readyz\n", text

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("metrics port: " + format, *args)
