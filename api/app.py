"""The application factory: builds the Flask application from its parts."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, NoReturn
from urllib.parse import urlsplit, urlunsplit

from flask import Response, g, request
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from api import authentication, call_log, cors, error_handlers, problems
from api.background.redis_checks import RedisChecks
from api.file_storage import FileStorage
from api.json_body import JsonRequest
from api.redis_clients import connect, connect_subscriber
from api.reference.document import DESCRIPTION, complete
from api.routes.health import Redis, health_routes
from api.routes.openai.batches import batch_routes
from api.routes.openai.client_paths import served_path
from api.routes.openai.completions import completion_routes
from api.routes.openai.file_services import FileServices
from api.routes.openai.files import file_routes
from api.routes.openai.models import model_routes
from api.routes.openai.responses import response_routes
from api.routes.page import page_routes
from api.routes.service_state import service_state_routes
from api.routes.task_services import REPLY_SLOTS, REPLY_WAIT_SECONDS, TaskServices
from api.routes.tasks import task_routes
from api.routes.worker_steps import step_routes
from api.schemas.replies import ProblemView
from api.shutdown import Shutdown
from api.streams.pubsub_hub import PubSubHub
from api.streams.step_feeds import StepFeeds
from api.streams.task_events import TaskEventReader
from api.submission import Submitter
from api.tenant_slots import TenantSlots
from monitoring.http import HttpMetrics
from monitoring.queue import QueueCollector
from monitoring.reaper import ReapFailures
from monitoring.redis_state import RedisStateMetrics
from monitoring.webhooks import WebhookMetrics
from tokenmill.protocol.store.batch_store import BatchStore
from tokenmill.protocol.store.file_index import FileIndex
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

DOCS_PREFIX = "/docs"
SPARE_CONNECTIONS = 16
"""Redis connections for the threads beside the HTTP threads."""
_TO_SWAGGER = '<meta http-equiv="refresh" content="0; url=swagger"><a href="swagger">The API</a>'


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    """The parts of the application that the process around it uses."""

    hub: PubSubHub
    step_feeds: StepFeeds
    reply_slots: TenantSlots
    shutdown: Shutdown
    reap_failures: ReapFailures
    redis_checks: RedisChecks
    webhook_metrics: WebhookMetrics
    file_storage: FileStorage


class ApiApp(OpenAPI):
    """Flask with OpenAPI 3.1, the JSON parser of `json_body`, and the paths of `client_paths`."""

    request_class = JsonRequest
    parts: AppParts
    settings: ApiSettings

    def generate_spec_json(self) -> None:
        super().generate_spec_json()  # type: ignore[no-untyped-call]  # as flask-openapi3 has it
        self.spec_json = complete(self.spec_json, is_secured=bool(self.settings.keyring))

    def wsgi_app(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ["PATH_INFO"] = served_path(environ.get("PATH_INFO", ""))
        return super().wsgi_app(environ, start_response)


def create_app(settings: ApiSettings, shutdown: Shutdown | None = None) -> ApiApp:
    """The WSGI application. Opens no connection and starts no thread before the first call.

    `shutdown`: set by the server to end open streams.
    """
    client = connect(settings.redis_url, settings.http_threads + SPARE_CONNECTIONS)
    store = TaskStore(client, retention_seconds=settings.retention_seconds)
    registry = CollectorRegistry()
    registry.register(QueueCollector(store, settings.slug, settings.public_model))
    metrics = HttpMetrics(registry)
    is_shared = settings.keyring.has_several_tenants
    parts = AppParts(
        hub=PubSubHub(
            lambda: connect_subscriber(settings.redis_url), lambda channel: client.publish(channel, b"")
        ),
        step_feeds=StepFeeds(lambda: connect_subscriber(settings.redis_url)),
        reply_slots=TenantSlots(REPLY_SLOTS, is_shared=is_shared, wait_seconds=REPLY_WAIT_SECONDS),
        shutdown=shutdown or Shutdown(),
        reap_failures=ReapFailures(registry, by_api=True),
        redis_checks=RedisChecks(client, RedisStateMetrics(registry)),
        webhook_metrics=WebhookMetrics(registry),
        file_storage=FileStorage(settings.files_place),
    )
    services = TaskServices(
        settings=settings,
        store=store,
        readers=Readers(client, retention_seconds=settings.retention_seconds),
        submitter=Submitter(settings, client, store),
        event_reader=TaskEventReader(parts.hub, store),
        step_feeds=parts.step_feeds,
        stream_slots=TenantSlots(settings.max_streams, is_shared=is_shared),
        reply_slots=parts.reply_slots,
        metrics=metrics,
        shutdown=parts.shutdown,
    )
    app = _bare_app(settings)
    app.parts = parts
    _install_hooks(app, settings, metrics)
    app.register_api(task_routes(services))
    app.register_api(service_state_routes(services))
    app.register_api(completion_routes(services))
    app.register_api(model_routes(services))
    app.register_api(response_routes(services))
    app.register_api(step_routes(services))
    app.register_blueprint(page_routes())
    files = FileServices(services, FileIndex(client), BatchStore(client), parts.file_storage)
    app.register_api(file_routes(files))
    app.register_api(batch_routes(files))
    app.register_api(health_routes(settings, store, registry, Redis(client, parts.redis_checks)))
    return app


def _install_hooks(app: ApiApp, settings: ApiSettings, metrics: HttpMetrics) -> None:
    # First, so that its hook after a call runs last.
    call_log.install(app, settings.keyring)
    error_handlers.install(app)
    _count_requests(app, metrics)
    _redirect_by_path(app)
    _omit_empty_content_type(app)
    cors.install(app, settings.allowed_origins)
    authentication.install(app, settings.keyring)


def _bare_app(settings: ApiSettings) -> ApiApp:
    app = ApiApp(
        __name__,
        info=Info(title="Tokenmill", version=version("tokenmill"), description=DESCRIPTION),
        # Without it flask-openapi3 writes null, which is not valid OpenAPI.
        security_schemes=authentication.schemes(settings.keyring),
        # Every operation documents its errors as `default`; the framework adds no other entry.
        validation_error_status="default",
        validation_error_model=ProblemView,
        validation_error_callback=_refuse,
        doc_prefix=DOCS_PREFIX,
        static_folder=None,
    )
    app.settings = settings
    # Members are shown in the order in which they are declared.
    app.json.sort_keys = False  # type: ignore[attr-defined]  # of the default provider
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.config["OPENAPI_HTML_STRING"] = _TO_SWAGGER
    return app


def _refuse(error: ValidationError) -> NoReturn:
    raise problems.from_validation(error) from error


def _count_requests(app: ApiApp, metrics: HttpMetrics) -> None:
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
    """Redirect to a path without scheme and host: a proxy may have changed those that the client used."""

    @app.after_request
    def relative(response: Response) -> Response:
        if 300 <= response.status_code < 400 and response.location:
            target = urlsplit(response.location)
            # Two slashes at the start would name another host.
            path = "/" + target.path.lstrip("/")
            response.location = urlunsplit(("", "", path, target.query, ""))
            response.data = b""
        return response


def _omit_empty_content_type(app: ApiApp) -> None:
    """Flask declares `text/html` even for replies without a body: status 204 and OPTIONS."""

    @app.after_request
    def omit(response: Response) -> Response:
        is_empty = request.method == "OPTIONS" and not response.get_data()
        if is_empty or response.status_code == HTTPStatus.NO_CONTENT:
            response.headers.pop("Content-Type", None)
        return response
