"""The list of a tenant's tasks: filters, and parts of bounded cost."""

import json
from collections.abc import Mapping

from flask import Response, request

from api.authentication import current_tenant
from api.problems import bad_field
from api.schemas.replies import TaskList
from api.schemas.requests import ListQuery
from api.schemas.task_view import summary
from tokenmill.protocol.snapshots import ListCursor, ListedTask
from tokenmill.protocol.store.task_store import TaskStore

MAX_EXAMINED = 1000
"""Tasks that one call looks at, in scripts of a fifth each, so that Redis serves other clients in between."""
_METADATA = "metadata."


def task_list(store: TaskStore, query: ListQuery) -> Response:
    """The reply of `GET /v1/tasks`. Raises `Problem` (400) for an unknown parameter."""
    metadata = _metadata_filter()
    found: list[ListedTask] = []
    cursor, num_left = _cursor(query.after), MAX_EXAMINED
    while True:
        page = store.list_tasks(
            current_tenant(),
            after=cursor,
            status=query.status or "",
            model=query.model or "",
            accepted_from_us=_microseconds(query.created_after),
            accepted_before_us=_microseconds(query.created_before),
            max_examined=min(num_left, MAX_EXAMINED // 5),
        )
        for task in page.tasks:
            if _fits(task, metadata):
                found.append(task)
            if len(found) == query.limit:
                # More may follow in this page or after it.
                return _reply(found, _cursor_of(task))
        num_left -= MAX_EXAMINED // 5
        cursor = page.next
        if cursor is None or num_left <= 0:
            return _reply(found, cursor)


def _reply(tasks: list[ListedTask], cursor: ListCursor | None) -> Response:
    body = TaskList(
        data=[summary(task) for task in tasks],
        has_more=cursor is not None,
        next=None if cursor is None else f"{cursor.accepted_us}-{cursor.task_id}",
    )
    return Response(body.model_dump_json(), content_type="application/json")


def _cursor(text: str | None) -> ListCursor | None:
    return None if text is None else ListCursor(*text.split("-"))


def _cursor_of(task: ListedTask) -> ListCursor:
    return ListCursor(str(task.snapshot.accepted_us), task.snapshot.task_id)


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


def _metadata_filter() -> dict[str, str]:
    """The `metadata.KEY=VALUE` of the query. Raises `Problem` for any other unknown or repeated parameter."""
    members: dict[str, str] = {}
    for name, (value, *others) in request.args.lists():
        if others:
            raise bad_field(name, "must be set once")
        if name.startswith(_METADATA) and len(name) > len(_METADATA):
            members[name.removeprefix(_METADATA)] = value
        elif name not in ListQuery.model_fields:
            known = ", ".join([*ListQuery.model_fields, "metadata.KEY"])
            raise bad_field(name, f"unknown parameter; a list of tasks has {known}", "unknown_field")
    return members


def _fits(task: ListedTask, metadata: Mapping[str, str]) -> bool:
    if not metadata:
        return True
    members = json.loads(task.snapshot.metadata) or {}
    return all(key in members and _text(members[key]) == value for key, value in metadata.items())


def _text(value: object) -> str:
    """A member of the metadata as a query spells it: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
