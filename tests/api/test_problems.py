"""Every error has the same shape."""

import json
from typing import Any

import pytest

from api.app import create_app
from api.problems import Problem, retry_seconds
from tests.api.api_client import ApiClient, client_of
from tokenmill.settings.declarations import ApiSettings


def check(reply: Any, status: int) -> Any:
    assert reply.status_code == status
    assert reply.content_type == "application/problem+json"
    body = json.loads(reply.data)
    assert {"type", "title", "status", "detail", "request_id", "error"} <= body.keys()
    assert body["error"].keys() == {"type", "code", "message", "param"}
    assert body["status"] == status
    assert reply.headers["X-Request-ID"] == body["request_id"]
    return body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/nope/\u00e9", 404),
        ("GET", "/static/x", 404),
        ("GET", "/docs/nope", 404),
        ("GET", "/docs/swagger/../../x", 404),
        # hashview#212: Flask's own page for a wrong method is HTML.
        ("PUT", "/v1/tasks", 405),
        ("PUT", "/v1/tasks/x", 405),
        ("FOO", "/livez", 405),
    ],
)
def test_errors_of_the_framework(client: ApiClient, method: str, path: str, status: int) -> None:
    check(client.open(path, method=method), status)


def test_a_wrong_method_sets_allow(client: ApiClient) -> None:
    assert "POST" in client.put("/v1/tasks").headers["Allow"]


def test_the_error_of_a_wrong_method_names_the_allowed_ones(client: ApiClient) -> None:
    body = check(client.put("/v1/tasks/x"), 405)
    assert body["detail"] == "PUT is not allowed here; allowed: DELETE, GET, HEAD, OPTIONS"


def test_a_reply_to_options_has_no_content_type(client: ApiClient) -> None:
    reply = client.options("/v1/tasks")
    assert (reply.status_code, reply.data) == (200, b"")
    assert "Content-Type" not in reply.headers
    assert "POST" in reply.headers["Allow"]


def test_an_unknown_path_lists_the_routes(client: ApiClient) -> None:
    body = check(client.post("/v1/task"), 404)
    assert body["routes"] == [
        "GET /",
        "GET /docs/",
        "GET /docs/openapi.json",
        "GET /health",
        "GET /livez",
        "GET /metrics",
        "GET /page/{name}",
        "GET /readyz",
        "GET /v1/batches",
        "POST /v1/batches",
        "GET /v1/batches/{batch_id}",
        "POST /v1/batches/{batch_id}/cancel",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /v1/files",
        "POST /v1/files",
        "DELETE /v1/files/{file_id}",
        "GET /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        "GET /v1/models",
        "GET /v1/models/{model}",
        "GET /v1/queue",
        "POST /v1/responses",
        "DELETE /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}",
        "POST /v1/responses/{response_id}/cancel",
        "GET /v1/responses/{response_id}/input_items",
        "GET /v1/tasks",
        "POST /v1/tasks",
        "DELETE /v1/tasks/{task_id}",
        "GET /v1/tasks/{task_id}",
        "POST /v1/tasks/{task_id}/cancel",
        "GET /v1/tasks/{task_id}/events",
        "GET /v1/workers",
        "GET /v1/workers/{name}/steps",
        "GET /v1/workers/{name}/trace",
    ]
    assert "POST /v1/tasks" in body["detail"]
    # The error for an unknown task lists no routes.
    assert "routes" not in check(client.get("/v1/tasks/x"), 404)


def test_an_internal_error_reveals_no_details(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the cause under the id that the client gets."""
    app = create_app(ApiSettings())

    @app.get("/boom")
    def boom() -> None:
        raise RuntimeError("secret")

    reply = client_of(app).get("/boom", headers={"X-Request-ID": "abc"})
    assert check(reply, 500)["error"]["type"] == "server_error"
    assert b"secret" not in reply.data
    assert "secret" in caplog.text
    assert "abc" in caplog.text


@pytest.mark.parametrize("given", ["abc-1.2_3:4", "x" * 128])
def test_a_well_formed_request_id_is_kept(client: ApiClient, given: Any) -> None:
    assert client.get("/livez", headers={"X-Request-ID": given}).headers["X-Request-ID"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "\xe9", "a,b", '"'])
def test_any_other_request_id_is_replaced(client: ApiClient, given: Any) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    first, second = (client.get("/livez", headers=headers).headers["X-Request-ID"] for _ in range(2))
    assert first != second
    assert first != given


@pytest.mark.parametrize(
    ("estimate", "seconds"),
    [(None, 1), (0, 1), (0.2, 1), (2.1, 3), (59.5, 60), (1e9, 60), (float("inf"), 1), (float("nan"), 1)],
)
def test_retry_after_is_within_what_clients_accept(estimate: Any, seconds: float) -> None:
    """OpenAI's clients do not retry after more than two minutes; 60 seconds is well below."""
    assert retry_seconds(estimate) == seconds


def test_members_of_a_problem_cannot_replace_its_own() -> None:
    body = Problem(429, "c", "d", members={"status": "x", "depth": 3}).to_json("id")
    assert (body["status"], body["depth"]) == (429, 3)
