"""Calls generated from the service's own document: each reply is one that the document describes."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
import redis
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import ApiApp, create_app
from api.reference.document import operations
from tests.api.api_client import client_of
from tests.api.conftest import CARD, HandWorker
from tests.conftest import RedisServer
from tokenmill.protocol.messages import LogEntry, Usage
from tokenmill.protocol.records import Claimed, Settlement, Write
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MAX_EXAMPLES = 12
HAND_OFF_SECONDS = 0.02

OPERATIONS = [
    (path, method)
    for path, method, _ in operations(create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0")).api_doc)
]


class Worker:
    """Ends every task at once, in a thread, with one token for each output."""

    def __init__(self, url: str, slug: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._store = TaskStore(self._client)
        self._slug = slug
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            claimed = self._store.claim(self._slug, worker="hand", max_tasks=8, lease_seconds=600)
            self._store.publish([_ended(task) for task in claimed])
            if not claimed:
                self._stopped.wait(HAND_OFF_SECONDS)


def _ended(task: Claimed) -> Write:
    entries: list[LogEntry] = []
    usage = Usage(prompt_tokens=3, completion_tokens=task.num_outputs)
    for index in range(task.num_outputs):
        is_last = index == task.num_outputs - 1
        entries.append(LogEntry.of_token(7, "a", index))
        entries.append(
            LogEntry.of_end("", "stop", index=index, done=is_last, usage=usage if is_last else None)
        )
    settlement = Settlement(
        status="completed", reason="stop", result="{}", prompt_tokens=3, completion_tokens=task.num_outputs
    )
    facts = {"scheduled": "0", "prompt_tokens": "3"}
    return Write(
        task_id=task.task_id, owner=task.owner, entries=tuple(entries), facts=facts, settlement=settlement
    )


class Service:
    """The application, its document, and tasks in every state."""

    def __init__(self, app: ApiApp) -> None:
        self.document = schemathesis.openapi.from_wsgi("/docs/openapi.json", app=app)
        self._client = client_of(app)

    def existing(self, path: str) -> dict[str, str]:
        """Parameters of the path that exist."""
        body = {"prompt": "x", "metadata": {"a": "b"}}
        task_id = self._client.post("/v1/tasks", json=body, headers={"Prefer": "wait=60"}).json["id"]
        known = {
            "task_id": task_id,
            "response_id": f"resp_{task_id}",
            "model": CARD.model,
            "name": "hand",
            "file_id": self.upload(),
            "batch_id": self.batch() if "{batch_id}" in path else "",
        }
        return {name: value for name, value in known.items() if f"{{{name}}}" in path}

    def upload(self) -> str:
        """A file of one request."""
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        form = {"purpose": "batch", "file": (io.BytesIO(json.dumps(line).encode()), "requests.jsonl")}
        return str(self._client.post("/v1/files", data=form).json["id"])

    def batch(self) -> str:
        return str(self._client.post("/v1/batches", json=self.batch_body()).json["id"])

    def batch_body(self) -> dict[str, str]:
        file_id = self.upload()
        return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture
def service(redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path) -> Iterator[Service]:
    settings = ApiSettings(
        redis_url=redis_server.url,
        max_waiting_tasks=0,
        max_waiting_tokens=0,
        files_url=str(tmp_path),
    )
    store = TaskStore(redis_client)
    store.put_model_card(settings.slug, CARD)
    HandWorker(store, settings.slug).report()
    app = create_app(settings)
    with closing(Worker(redis_server.url, settings.slug)):
        yield Service(app)
    app.parts.hub.close()
    app.parts.step_feeds.close()


EXAMPLES = hypothesis.settings(
    max_examples=MAX_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_reply_is_described(service: Service, path: str, method: str) -> None:
    """Of calls that the document allows, half of them about something that exists."""
    statuses: set[int] = set()
    # The steps of a worker that exists never end.
    has_existing = ("{" in path and not path.endswith("/steps")) or path == "/v1/batches"

    @EXAMPLES
    @hypothesis.given(
        case=service.document[path][method.upper()].as_strategy(),
        exists=st.booleans() if has_existing else st.just(False),
    )
    def check(case: schemathesis.Case[Any], exists: bool) -> None:
        if exists:
            case.path_parameters = service.existing(path)
        if exists and path == "/v1/batches" and method == "post":
            case.body = {**cast(dict[str, Any], case.body), **service.batch_body()}
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    check()
    assert path.endswith("/steps") or min(statuses) < 300, statuses


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_calls_against_the_document_are_refused_as_described(
    service: Service, path: str, method: str
) -> None:
    operation = service.document[path][method.upper()]
    if not (operation.body or operation.query):
        pytest.skip("nothing but its path can be wrong")

    @EXAMPLES
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def check(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=CHECKS)

    check()
