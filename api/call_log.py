"""One log line for each HTTP call, once its reply has been sent.

Queries, headers and bodies are never logged. Health probes and polls of the metrics are logged at debug
level.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import structlog
from flask import Flask, Response, g, request

from api.authentication import current_tenant
from api.problems import excerpt, request_id
from tokenmill.settings.credentials import Keyring

PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})

_log = structlog.get_logger(__name__)


def note_task(task_id: str) -> None:
    """Name the task that the current call is about. The call may be about several."""
    if task_id not in (tasks := g.setdefault("logged_tasks", [])):
        tasks.append(task_id)


def install(app: Flask, keyring: Keyring) -> None:
    """Log the calls of `app`. Register it before other hooks: it must see their replies."""

    @app.before_request
    def start() -> None:
        g.call_started = time.monotonic()

    @app.after_request
    def log_when_sent(response: Response) -> Response:
        call = _Call(response, keyring)
        if response.is_streamed:
            parts: Any = call.counted(response.response)
            response.response = parts
        response.call_on_close(call.log)
        return response


class _Call:
    """What is known of a call when its reply begins: its context is gone when the reply has been sent."""

    def __init__(self, response: Response, keyring: Keyring) -> None:
        self._started = g.get("call_started", time.monotonic())
        self._num_bytes = 0 if response.is_streamed else len(response.get_data())
        is_probe = (request.url_rule.rule if request.url_rule else request.path) in PROBES
        self._level = "debug" if is_probe else "warning" if response.status_code >= 500 else "info"
        self._fields = {
            "method": request.method,
            **_route_or_path(keyring),
            "status": response.status_code,
            "tenant": current_tenant(),
            "request_id": request_id(),
            **_tasks(),
            "client": request.remote_addr,
        }

    def counted(self, parts: Iterable[bytes | str]) -> "_Counted":
        return _Counted(parts, self)

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def log(self) -> None:
        milliseconds = round((time.monotonic() - self._started) * 1000, 1)
        write = getattr(_log, self._level)
        write("call", **self._fields, ms=milliseconds, bytes=self._num_bytes)


class _Counted:
    """The parts of a streamed body. Closing it closes them."""

    def __init__(self, parts: Iterable[bytes | str], call: _Call) -> None:
        self._parts = parts
        self._iterator = iter(parts)
        self._call = call

    def __iter__(self) -> Iterator[bytes | str]:
        return self

    def __next__(self) -> bytes | str:
        part = next(self._iterator)
        self._call.add(len(part))
        return part

    def close(self) -> None:
        close: Any = getattr(self._parts, "close", None)
        if close:
            close()


def _route_or_path(keyring: Keyring) -> dict[str, str]:
    """The rule that matched; of other calls the path, without keys of this service."""
    if request.url_rule:
        return {"route": request.url_rule.rule}
    segments = request.path.split("/")
    shown = ["***" if segment and keyring.tenant_of(segment) else segment for segment in segments]
    return {"path": excerpt("/".join(shown))}


def _tasks() -> dict[str, str]:
    tasks = list(g.get("logged_tasks", ()))
    named = (request.view_args or {}).get("task_id")
    if named and named not in tasks:
        tasks.insert(0, excerpt(named))
    return {"task": ",".join(tasks)} if tasks else {}
