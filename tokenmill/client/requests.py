"""The calls of the HTTP API, and the settings of the client that sends them."""

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast
from urllib.parse import quote, urlsplit

import httpx

from tokenmill.client.calls import Request
from tokenmill.client.parameters import TaskFilters

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "TOKENMILL_URL"
API_KEY_VARIABLE = "TOKENMILL_API_KEY"
MAX_PAGE = 100
"""The most tasks in one page of a list."""
_API_KEY = re.compile(r"[\x21-\x7e]+")
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_TASKS = "/v1/tasks"


@dataclass(frozen=True)
class Address:
    """Where and as whom a client calls. The key is never shown."""

    base_url: str
    api_key: str | None = field(repr=False)

    @classmethod
    def resolve(cls, base_url: str | None, api_key: str | None) -> "Address":
        """Values that are None come from the environment; an empty key is none.

        Raises ValueError, without the key.
        """
        url = base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        key = (os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key) or None
        _check_url(url)
        if key and not _API_KEY.fullmatch(key):
            raise ValueError("api_key must be printable ASCII without spaces")
        return cls(url.rstrip("/"), key)

    @property
    def http_options(self) -> dict[str, Any]:
        """Arguments of an httpx client of this address. Calls to this machine use no proxy."""
        return {
            "mounts": {f"all://{host}": None for host in _LOCAL_HOSTS},
            # As many calls at a time as the caller has threads or tasks.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        }

    def arguments(self, request: Request, timeout: float) -> dict[str, Any]:
        """Arguments of `build_request` of an httpx client. `timeout`: seconds."""
        headers = {"X-Request-ID": request.request_id, "User-Agent": "tokenmill-client", **request.headers}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {
            "method": request.method,
            "url": self.base_url + request.path,
            "params": dict(request.params) or None,
            "headers": headers,
            "json": request.json,
            "timeout": httpx.Timeout(timeout, read=timeout + request.timeout, pool=None),
        }


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_usable = False
    if not is_usable:
        raise ValueError(f"base_url must be an address that starts with http:// or https://, not {url!r}")


def task_path(task_id: str) -> str:
    """Raises ValueError for an id that would be another path."""
    if not task_id or task_id in (".", ".."):
        raise ValueError(f"{task_id!r} is not the id of a task")
    return f"{_TASKS}/{quote(task_id, safe='')}"


def events_path(task_id: str) -> str:
    return f"{task_path(task_id)}/events"


def submission(prompt: str | None, key: str | None, fields: Mapping[str, Any]) -> Request:
    """A submission with an idempotency key, so that it can be repeated."""
    body = {"prompt": prompt, **fields}
    return Request(
        method="POST",
        path=_TASKS,
        headers={"Idempotency-Key": key or uuid.uuid4().hex},
        json={name: value for name, value in body.items() if value is not None},
    )


def one_task(task_id: str, wait: float = 0.0, *, include_prompt: bool = False) -> Request:
    params: dict[str, str] = {"wait": f"{wait:g}"} if wait else {}
    if include_prompt:
        params["include"] = "prompt"
    return Request(method="GET", path=task_path(task_id), params=params, timeout=wait)


def cancellation(task_id: str) -> Request:
    return Request(method="POST", path=f"{task_path(task_id)}/cancel", json={})


MODELS = "/v1/models"


def page(filters: TaskFilters, cursor: str | None, limit: int | None) -> Request:
    """A page of the list of tasks, of at most `limit` tasks."""
    params: dict[str, str] = {"limit": str(MAX_PAGE if limit is None else min(limit, MAX_PAGE))}
    if cursor is not None:
        params["after"] = cursor
    for name in ("status", "model"):
        if (text := filters.get(name)) is not None:
            params[name] = str(text)
    for key, value in (filters.get("metadata") or {}).items():
        params[f"metadata.{key}"] = value
    for name in ("created_after", "created_before"):
        if (moment := filters.get(name)) is not None:
            params[name] = str(_seconds(cast("float | datetime", moment)))
    return Request(method="GET", path=_TASKS, params=params)


def _seconds(moment: float | datetime) -> float:
    return moment.timestamp() if isinstance(moment, datetime) else moment


def read(path: str) -> Request:
    return Request(method="GET", path=path)
