"""The OpenAPI document is valid, complete and accurate, and is shown without a network."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from api.schemas.replies import ProblemView, Task
from api.schemas.requests import INPUTS, TaskBody
from api.schemas.sampling import SAMPLING_FIELDS
from tests.api.api_client import ApiClient
from tests.api.conftest import HandWorker, Submit

METHODS = {"get", "post", "delete", "put", "patch"}


@pytest.fixture
def spec(client: ApiClient) -> Any:
    return client.get("/docs/openapi.json").json


def operations(spec: Any) -> Any:
    return [(path, method, op) for path, item in spec["paths"].items() for method, op in item.items()]


def test_the_version_and_the_paths(spec: Any) -> None:
    assert spec["openapi"].startswith("3.1")
    assert spec["info"]["title"] == "Tokenmill"
    assert {(path, method) for path, method, _ in operations(spec)} == {
        ("/v1/tasks", "post"),
        ("/v1/tasks", "get"),
        ("/v1/queue", "get"),
        ("/v1/workers", "get"),
        ("/v1/tasks/{task_id}", "get"),
        ("/v1/tasks/{task_id}", "delete"),
        ("/v1/tasks/{task_id}/events", "get"),
        ("/v1/tasks/{task_id}/cancel", "post"),
        ("/v1/chat/completions", "post"),
        ("/v1/completions", "post"),
        ("/v1/models", "get"),
        ("/v1/responses", "post"),
        ("/v1/responses/{response_id}", "get"),
        ("/v1/responses/{response_id}", "delete"),
        ("/v1/responses/{response_id}/cancel", "post"),
        ("/v1/responses/{response_id}/input_items", "get"),
        ("/v1/models/{model}", "get"),
        ("/v1/workers/{name}/steps", "get"),
        ("/v1/workers/{name}/trace", "get"),
        ("/v1/files", "post"),
        ("/v1/files", "get"),
        ("/v1/files/{file_id}", "get"),
        ("/v1/files/{file_id}", "delete"),
        ("/v1/files/{file_id}/content", "get"),
        ("/v1/batches", "post"),
        ("/v1/batches", "get"),
        ("/v1/batches/{batch_id}", "get"),
        ("/v1/batches/{batch_id}/cancel", "post"),
        ("/livez", "get"),
        ("/readyz", "get"),
        ("/health", "get"),
        ("/metrics", "get"),
    }


def test_no_null_where_openapi_requires_a_value(spec: Any) -> None:
    """Null members make a generated document invalid; only a default may be null."""

    def nulls(value: Any, path: str = "") -> Iterator[Any]:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in ("default", "example"):
                    yield from nulls(inner, f"{path}/{name}")
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from nulls(inner, f"{path}/{index}")
        elif value is None:
            yield path

    assert list(nulls(spec)) == []


def test_every_reference_resolves(spec: Any) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(spec)))
    assert names <= spec["components"]["schemas"].keys()
    assert {"Task", "TaskBody", "ProblemView", "Readiness"} <= names


def test_every_operation_is_described(spec: Any) -> None:
    ids = [op["operationId"] for _, _, op in operations(spec)]
    assert len(set(ids)) == len(ids)
    for path, method, operation in operations(spec):
        assert method in METHODS
        assert operation["summary"]
        assert operation["tags"]
        # Errors of every kind have one shape.
        assert "ProblemView" in json.dumps(operation["responses"]["default"])
        assert "422" not in operation["responses"]
        for response in operation["responses"].values():
            assert response["description"], (path, method)
        named = {
            parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"
        }
        assert named == set(re.findall(r"{(\w+)}", path))


def test_headers_and_queries_are_described(spec: Any) -> None:
    def parameters(path: str, method: str) -> Any:
        return {p["name"] for p in spec["paths"][path][method]["parameters"]}

    assert {"Idempotency-Key", "Prefer"} <= parameters("/v1/tasks", "post")
    assert {"after", "Last-Event-ID"} <= parameters("/v1/tasks/{task_id}/events", "get")
    assert "wait" in parameters("/v1/tasks/{task_id}", "get")


def test_the_body_is_described(spec: Any) -> None:
    body = spec["components"]["schemas"]["TaskBody"]
    assert body["additionalProperties"] is False
    assert set(INPUTS) | set(SAMPLING_FIELDS) <= body["properties"].keys()
    assert all("description" in field for field in body["properties"].values())
    TaskBody.model_validate(body["example"], strict=True)


def test_replies_match_their_schema(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    submit()
    task_id = worker.run("a")
    Task.model_validate(client.get(f"/v1/tasks/{task_id}").json, strict=True)
    ProblemView.model_validate(client.get("/v1/tasks/x").json, strict=True)


def test_the_docs_page_loads_nothing_from_other_hosts(client: ApiClient) -> None:
    """It works without a network."""
    assert client.get("/docs", follow_redirects=True).status_code == 200
    page = client.get("/docs/swagger")
    assert page.status_code == 200
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(parts) >= 4
    for part in parts:
        assert "//" not in part
        with client.get(f"/docs/{part}") as reply:
            assert reply.status_code == 200


@pytest.mark.parametrize(
    ("path", "target"),
    [("/docs", "/docs/"), ("/docs?a=1", "/docs/?a=1"), ("/docs//swagger", "/docs/swagger")],
)
def test_a_redirect_names_neither_scheme_nor_host(client: ApiClient, path: str, target: str) -> None:
    """A TLS proxy has another scheme, and a client can send any Host."""
    reply = client.get(path, base_url="http://elsewhere.example")

    assert reply.status_code == 308
    assert reply.headers["Location"] == target
    assert b"elsewhere" not in reply.data
