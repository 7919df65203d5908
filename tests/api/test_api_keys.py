"""API keys: a call without one is refused, and one tenant cannot see or change another's tasks."""

import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, MakeApp, StartServer
from tokenmill.settings.declarations import ApiSettings
from tokenmill.settings.errors import SettingError

BODY = {"prompt": "hello", "max_tokens": 4}
KEYS = "alice:secret-of-alice, alice:other-of-alice bob:secret-of-bob"


def shows(key: str) -> Any:
    return {"Authorization": f"Bearer {key}"}


ALICE, BOB = shows("secret-of-alice"), shows("secret-of-bob")
CALLS = [("POST", "/v1/tasks"), ("GET", "/v1/tasks/{}"), ("GET", "/v1/tasks/{}/events"),
         ("POST", "/v1/tasks/{}/cancel"), ("DELETE", "/v1/tasks/{}"), ("GET", "/v1/nothing")]  # fmt: skip


@pytest.fixture
def settings(redis_url: str) -> Any:
    return ApiSettings(redis_url=redis_url, api_keys=KEYS)


@pytest.fixture
def task_id(client: ApiClient) -> Any:
    return client.post("/v1/tasks", json=BODY, headers=ALICE).json["id"]


@pytest.mark.parametrize(("method", "path"), CALLS)
@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Basic c2VjcmV0", "missing_api_key"),
        ("Bearer secret-of-alic", "invalid_api_key"),
        ("Bearer alice:secret-of-alice", "invalid_api_key"),
        ("Bearer \xff", "invalid_api_key"),
    ],
)
def test_a_call_without_a_key_is_refused(
    client: ApiClient, task_id: str, redis_client: redis.Redis, method: str, path: str, header: str, code: str
) -> None:
    """The body, which is not JSON here, is not read."""
    before = sorted(redis_client.keys())
    headers = {} if header is None else {"Authorization": header}
    reply = client.open(path.format(task_id), method=method, data=b"{", headers=headers)
    assert (reply.status_code, reply.json["error"]["code"]) == (401, code)
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.content_type == "application/problem+json"
    assert "secret" not in reply.text
    assert sorted(redis_client.keys()) == before


def test_a_refusal_does_not_call_redis(make_app: MakeApp) -> None:
    client = client_of(make_app(ApiSettings(redis_url="redis://127.0.0.1:1/0", api_keys=KEYS)))
    assert client.post("/v1/tasks", json=BODY).status_code == 401
    assert client.post("/v1/tasks", json=BODY, headers=ALICE).status_code == 503


def test_a_large_body_without_a_key_gets_its_error(start: StartServer) -> None:
    """Closing a connection with unread bytes would reset it, and the reply would be lost.

    A body that is too large or wrongly framed is refused by the server itself, before keys are checked.
    """
    server = start(TOKENMILL_API_KEYS=KEYS)
    assert server.call("POST", "/v1/tasks", {"prompt": "x" * 2_000_000})[0] == 401
    assert server.call("POST", "/v1/tasks", {"prompt": "x" * 8_000_000})[0] == 413
    for body, status in ((b"zz\r\nx\r\n", b"400"), (b"1\r\nx\r\n0\r\n bad trailer\r\n\r\n", b"401")):
        with socket.create_connection(server.address, timeout=60) as connection:
            connection.sendall(
                b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body
            )
            assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_health_and_docs_need_no_key(client: ApiClient) -> None:
    statuses = {
        path: client.get(path).status_code for path in ("/livez", "/readyz", "/metrics", "/docs/swagger")
    }
    assert statuses == {"/livez": 200, "/readyz": 503, "/metrics": 200, "/docs/swagger": 200}


@pytest.mark.parametrize("key", ["secret-of-alice", "other-of-alice"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_tenant_may_use_any_of_its_keys(client: ApiClient, task_id: str, key: str, scheme: Any) -> None:
    reply = client.get(f"/v1/tasks/{task_id}", headers={"Authorization": f"{scheme} {key}"})
    assert (reply.status_code, reply.json["id"]) == (200, task_id)


@pytest.mark.parametrize(("method", "path"), CALLS[1:5])
@pytest.mark.parametrize("ended", [False, True])
def test_the_task_of_another_tenant_is_not_found(
    client: ApiClient, worker: HandWorker, task_id: str, method: str, path: str, ended: Any
) -> None:
    if ended:
        worker.run("a")

    def answer(some_id: Any) -> Any:
        reply = client.open(path.format(some_id), method=method, headers={**BOB, "X-Request-ID": "x"})
        return reply.status_code, reply.json, [pair for pair in reply.headers if pair[0] != "Date"]

    unknown = f"{int(time.time() * 1000):012x}{'0' * 20}"
    assert answer(task_id) == answer(unknown)
    assert answer(task_id)[0] == 404
    kept = client.get(f"/v1/tasks/{task_id}", headers=ALICE).json
    assert kept["status"] == ("completed" if ended else "queued")


def test_idempotency_keys_are_separate_for_each_tenant(client: ApiClient) -> None:
    def post(who: Any, **more: Any) -> Any:
        return client.post("/v1/tasks", json={**BODY, **more}, headers={**who, "Idempotency-Key": "k"})

    alice, bob = post(ALICE), post(BOB, max_tokens=5)
    assert (alice.status_code, bob.status_code) == (202, 202)
    assert alice.json["id"] != bob.json["id"]
    assert post(shows("other-of-alice")).json["id"] == alice.json["id"]
    assert post(BOB).status_code == 422


def test_each_tenant_has_its_own_queue(client: ApiClient, task_id: str, worker: HandWorker) -> None:
    client.post("/v1/tasks", json=BODY, headers=ALICE)
    bobs = client.post("/v1/tasks", json=BODY, headers=BOB).json["id"]
    assert worker.claim(3)[:2] == [task_id, bobs]


def test_openapi_describes_the_scheme_if_there_are_keys(
    client: ApiClient, make_app: MakeApp, redis_url: str
) -> None:
    spec = client.get("/docs/openapi.json").json
    (scheme,) = spec["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, item in spec["paths"].items():
        for operation in item.values():
            assert bool(operation.get("security")) is path.startswith("/v1/")
    open_to_all = client_of(make_app(ApiSettings(redis_url=redis_url))).get("/docs/openapi.json").json
    assert not open_to_all["components"].get("securitySchemes")
    assert '"security":' not in json.dumps(open_to_all)


def test_without_api_keys_every_call_is_allowed(make_app: MakeApp, redis_url: str, task_id: str) -> None:
    """Including calls for tasks that were submitted with a key."""
    client = client_of(make_app(ApiSettings(redis_url=redis_url)))
    assert client.get(f"/v1/tasks/{task_id}").status_code == 200
    assert client.post("/v1/tasks", json=BODY, headers=shows("anything")).status_code == 202


def test_no_key_is_shown_or_kept(
    settings: ApiSettings,
    client: ApiClient,
    task_id: str,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    client.get(f"/v1/tasks/{task_id}", headers=ALICE)
    client.get(f"/v1/tasks/{task_id}", headers=shows("unknown-secret"))
    shown = repr(settings) + repr(settings.keyring) + caplog.text
    assert "secret" not in shown
    kept = [redis_client.dump(key) or b"" for key in redis_client.scan_iter()]
    assert not any(b"secret-of" in value for value in kept)


def test_keys_come_from_variable_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nbob:two\n\n  # carol:four\ncarol:three#3\n")
    environ = {"TOKENMILL_API_KEYS": "alice:one", "TOKENMILL_API_KEYS_FILE": str(file)}
    keyring = ApiSettings.load(environ).keyring
    tenants = {key: keyring.tenant_of(key) for key in ("one", "two", "three#3", "four", "", "alice:one")}
    assert tenants == {
        "one": "alice",
        "two": "bob",
        "three#3": "carol",
        "four": None,
        "": None,
        "alice:one": None,
    }
    assert not ApiSettings.load({"TOKENMILL_API_KEYS": " "}).keyring


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topsecret", "entry 1"),
        ("a:good b:", "entry 2"),
        (":topsecret", "entry 1"),
        ("a b:topsecret", "entry 1"),
        ("a:topsecret,b:topsecret", "another tenant"),
        ("# a:topsecret", "there are no entries"),
        (",", "there are no entries"),
        ("a:t\xf6psecret", "entry 1"),
    ],
)
def test_bad_keys_are_refused_and_not_repeated(tmp_path: Path, text: str, message: str) -> None:
    """Even if no key remains: a service that should be protected must not be open."""
    file = tmp_path / "keys"
    file.write_text(text)
    for environ in ({"TOKENMILL_API_KEYS": text}, {"TOKENMILL_API_KEYS_FILE": str(file)}):
        with pytest.raises(SettingError, match=message) as refused:
            ApiSettings.load(environ).check_files()
        assert "secret" not in str(refused.value)
        assert str(refused.value).split()[0] in environ


def test_the_key_file_must_exist(tmp_path: Path) -> None:
    for content in (None, b"", b"\xff"):
        file = tmp_path / "keys"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(SettingError, match="TOKENMILL_API_KEYS_FILE"):
            ApiSettings.load({"TOKENMILL_API_KEYS_FILE": str(file)}).check_files()


def test_the_tenant_default_owns_tasks_submitted_without_keys(redis_url: str, make_app: MakeApp) -> None:
    before = client_of(make_app(ApiSettings(redis_url=redis_url)))
    task_id = before.post("/v1/tasks", json=BODY).json["id"]
    keys = f"default:secret-of-before {KEYS}"
    client = client_of(make_app(ApiSettings(redis_url=redis_url, api_keys=keys)))
    url = f"/v1/tasks/{task_id}"
    assert client.get(url, headers=shows("secret-of-before")).json["id"] == task_id
    assert client.get(url, headers=ALICE).status_code == 404


def test_a_tenant_that_fills_its_share_blocks_no_other(redis_url: str, make_app: MakeApp) -> None:
    settings = ApiSettings(redis_url=redis_url, api_keys=KEYS, max_waiting_tasks=6)
    client = client_of(make_app(settings))
    replies = [client.post("/v1/tasks", json=BODY, headers=ALICE) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [202, 202, 202, 429]
    problem = replies[-1].json
    assert (problem["limit_met"], problem["limit_of"]) == ("tasks", "tenant")
    assert (problem["tenant_depth"], problem["depth"], problem["limit"]) == (3, 3, 6)
    assert "of this tenant" in problem["detail"]
    assert client.post("/v1/tasks", json=BODY, headers=BOB).status_code == 202
