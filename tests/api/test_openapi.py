"""The OpenAPI document is valid, complete and accurate, and is shown without a network."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import schemathesis
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

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
    assert spec["info"]["version"] == version("tokenmill")
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
    """Null members make a generated document invalid; only examples and an enumeration may have them."""

    def nulls(value: Any, path: str = "") -> Iterator[Any]:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in ("example", "examples", "enum"):
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
        assert operation["description"]
        assert "default" not in operation["responses"]
        for status, response in operation["responses"].items():
            assert response["description"], (path, method)
            # Errors of every kind have one shape, and each code has an example.
            if int(status) >= 400:
                content = response["content"]["application/problem+json"]
                assert content["schema"] == {"$ref": "#/components/schemas/ProblemView"}
                assert content["examples"]
        named = {
            parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"
        }
        assert named == set(re.findall(r"{(\w+)}", path))


def test_operation_ids_are_words(spec: Any) -> None:
    ids = {op["operationId"] for _, _, op in operations(spec)}
    assert {"submit_task", "get_task", "follow_task", "continue_chat", "list_models"} <= ids
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", one) for one in ids)


def test_the_document_is_valid_openapi(spec: Any) -> None:
    """By the schema of OpenAPI 3.1, and each schema by its dialect."""
    schemathesis.openapi.from_dict(spec).validate()
    for schema in spec["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_an_invalid_document_is_found(spec: Any) -> None:
    with pytest.raises(ValueError, match="version"):
        schemathesis.openapi.from_dict({**spec, "info": {"title": "x"}}).validate()


def contents(spec: Any) -> Iterator[tuple[str, Any]]:
    """Every body of a call, a reply or a webhook, with where it is."""
    webhooks = [(name, method, op) for name, item in spec["webhooks"].items() for method, op in item.items()]
    for path, method, operation in [*operations(spec), *webhooks]:
        parts = {"body": operation.get("requestBody", {}), **operation["responses"]}
        for name, part in parts.items():
            for kind, content in part.get("content", {}).items():
                yield f"{method} {path} {name} {kind}", content


def test_every_body_and_reply_has_an_example_that_fits_its_schema(spec: Any) -> None:
    registry = Registry().with_resource("urn:document", DRAFT202012.create_resource(spec))
    for where, content in contents(spec):
        if "json" not in where:
            continue
        assert "example" in content or "examples" in content, where
        references = content.get("examples", {}).values()
        reference = content["schema"]["$ref"]
        named = [
            spec["components"]["examples"][one["$ref"].rpartition("/")[2]]["value"] for one in references
        ]
        validator = Draft202012Validator({"$ref": f"urn:document{reference}"}, registry=registry)
        for example in named or [content["example"]]:
            assert not list(validator.iter_errors(example)), where


def test_null_is_a_type_and_not_an_alternative_to_one(spec: Any) -> None:
    """Only a reference needs `anyOf` to allow null."""
    for found in re.findall(r'"anyOf": (\[[^\[\]]*\])', json.dumps(spec)):
        alternatives = json.loads(found)
        if {"type": "null"} in alternatives:
            assert any("$ref" in one or len(one) > 1 for one in alternatives), found
    assert '"default": null' not in json.dumps(spec["components"]["schemas"])


def test_members_are_in_the_order_of_their_declaration(client: ApiClient) -> None:
    text = client.get("/docs/openapi.json").text
    assert text.index('"openapi"') < text.index('"paths"') < text.index('"components"')
    properties = json.loads(text)["components"]["schemas"]["Task"]["properties"]
    assert list(properties) == list(Task.model_fields)


def test_the_webhook_is_described(spec: Any) -> None:
    webhook = spec["webhooks"]["taskEnded"]["post"]
    headers = {parameter["name"] for parameter in webhook["parameters"]}
    assert headers == {"webhook-id", "webhook-timestamp", "webhook-signature", "X-Request-ID"}


def test_every_tag_is_described(spec: Any) -> None:
    described = {tag["name"] for tag in spec["tags"] if tag["description"]}
    assert {tag for _, _, op in operations(spec) for tag in op["tags"]} <= described


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
