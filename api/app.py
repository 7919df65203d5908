"""The application factory: wires the rooms' parts together. Holds no rule of its own."""

import time
from typing import NoReturn
from urllib.parse import urlsplit, urlunsplit

from flask import Response, g, request
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from api import authentication, problems
from api.json_body import JsonRequest
from api.redis_checks import RedisChecks
from api.redis_clients import connect, connect_subscriber
from api.reply_slots import ReplySlots
from api.routes.health import Redis, health_routes
from api.routes.tasks import TaskServices, task_routes
from api.schemas.replies import ProblemView
from api.settings import ApiSettings
from api.streams.follow import Follower
from api.streams.hub import Hub
from api.streams.presence import Places, Shutdown
from api.submission import Submitter
from monitoring.http import HttpMetrics
from monitoring.queue import QueueCollector
from monitoring.reaper import ReapFailures
from monitoring.redis_state import RedisStateMetrics
from monitoring.webhooks import WebhookMetrics
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore

DOCS_PREFIX = "/docs"
SPARE_CONNECTIONS = 16
"""Connections to Redis of threads that answer no call."""
_TO_SWAGGER = '<meta http-equiv="refresh" content="0; url=swagger"><a href="swagger">The API</a>'


class ApiApp(OpenAPI):
    """Flask with OpenAPI 3.1, whose JSON bodies are checked before a schema sees them."""

    request_class = JsonRequest


def create_app(settings: ApiSettings, shutdown: Shutdown | None = None) -> ApiApp:
    """The WSGI application. Opens no connection and starts no thread before the first call.

    `shutdown`: set by the server when it wants open streams to end.
    """
    client = connect(settings.redis_url, settings.http_threads + SPARE_CONNECTIONS)
    store = TaskStore(client, retention_seconds=settings.retention_seconds)
    hub = Hub(lambda: connect_subscriber(settings.redis_url), lambda name: client.publish(name, b""))
    registry = CollectorRegistry()
    registry.register(QueueCollector(store, settings.slug, settings.public_model))
    metrics = HttpMetrics(registry)
    services = TaskServices(
        settings=settings,
        store=store,
        readers=Readers(client, retention_seconds=settings.retention_seconds),
        submitter=Submitter(settings, client, store),
        follower=Follower(hub, store),
        places=Places(settings.max_streams, is_shared=settings.keyring.has_several_tenants),
        reply_slots=ReplySlots(is_shared=settings.keyring.has_several_tenants),
        metrics=metrics,
        shutdown=shutdown or Shutdown(),
    )
    app = _bare_app(settings)
    problems.install(app)
    _observe(app, metrics)
    _redirect_by_path(app)
    authentication.install(app, settings.keyring)
    app.register_api(task_routes(services))
    checks = RedisChecks(client, RedisStateMetrics(registry))
    app.register_api(health_routes(settings, store, registry, Redis(client, checks)))
    app.extensions["hub"] = hub
    app.extensions["reply_slots"] = services.reply_slots
    app.extensions["shutdown"] = services.shutdown
    app.extensions["webhook_metrics"] = WebhookMetrics(registry)
    app.extensions["reap_failures"] = ReapFailures(registry, by_api=True)
    app.extensions["redis_checks"] = checks
    return app


def _bare_app(settings: ApiSettings) -> ApiApp:
    app = ApiApp(
        __name__,
        info=Info(title="Tokenmill", version="1", description=_DESCRIPTION),
        # Left out, it would be written as null, which is no valid OpenAPI.
        security_schemes=authentication.schemes(settings.keyring),
        # Every operation describes its errors as `default`, so that no separate one is added for bodies.
        validation_error_status="default",
        validation_error_model=ProblemView,
        validation_error_callback=_refuse,
        doc_prefix=DOCS_PREFIX,
        static_folder=None,
    )
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.config["OPENAPI_HTML_STRING"] = _TO_SWAGGER
    return app


def _refuse(error: ValidationError) -> NoReturn:
    raise problems.from_validation(error) from error


def _observe(app: ApiApp, metrics: HttpMetrics) -> None:
    @app.before_request
    def start() -> None:
        g.started = time.monotonic()

    @app.after_request
    def count(response: Response) -> Response:
        route = request.url_rule.rule if request.url_rule else None
        seconds = time.monotonic() - g.get("started", time.monotonic())
        metrics.observe(route, request.method, response.status_code, seconds)
        return response


def _redirect_by_path(app: ApiApp) -> None:
    """Redirects keep the scheme and host that the client used, which a proxy in front may have changed."""

    @app.after_request
    def relative(response: Response) -> Response:
        if 300 <= response.status_code < 400 and response.location:
            target = urlsplit(response.location)
            # One slash: two would begin the name of another host.
            path = "/" + target.path.lstrip("/")
            response.location = urlunsplit(("", "", path, target.query, ""))
            response.data = b""
        return response


_DESCRIPTION = "Submit requests for text, then poll them or follow their tokens."
