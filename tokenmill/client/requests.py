"""The calls of the HTTP API that concern tasks."""

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast
from urllib.parse import quote

from tokenmill.client.parameters import TaskFilters
from tokenmill.client.steps import Request

MAX_PAGE = 100
"""The most tasks in one page of a list."""
_TASKS = "/v1/tasks"


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


def deletion(task_id: str) -> Request:
    return Request(method="DELETE", path=task_path(task_id))


MODELS = "/v1/models"
QUEUE = "/v1/queue"
WORKERS = "/v1/workers"


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
