"""Calls from pages of other origins."""

from typing import Any

import pytest

from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import MakeApp
from tokenmill.settings.declarations import ApiSettings
from tokenmill.settings.errors import SettingError

ORIGIN = "https://chat.example.com"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def make_client(make_app: MakeApp, redis_url: str, origins: str | None) -> ApiClient:
    settings: Any = {"api_keys": "ann:a-secret-key-of-ann", **({"cors_origins": origins} if origins else {})}
    return client_of(make_app(ApiSettings(redis_url=redis_url, **settings)))


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (f"http://localhost:3000, {ORIGIN}", ORIGIN, ORIGIN),
        ("*", ORIGIN, "*"),
        (ORIGIN, "https://evil.example.com", None),
        (ORIGIN, f"{ORIGIN}.evil.com", None),
        (None, ORIGIN, None),
    ],
)
def test_an_origin(
    make_app: MakeApp, redis_url: str, origins: str | None, origin: str, allowed: str | None
) -> None:
    client = make_client(make_app, redis_url, origins)
    url = "/v1/chat/completions"
    preflight = client.open(url, method="OPTIONS", headers={"Origin": origin, **PREFLIGHT})
    assert preflight.headers.get("Access-Control-Allow-Origin") == allowed
    if allowed:
        assert preflight.status_code == 204
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    else:
        assert "Access-Control-Allow-Methods" not in preflight.headers
    for headers, status in (({}, 401), ({"Authorization": "Bearer a-secret-key-of-ann"}, 200)):
        reply = client.get("/v1/models", headers={"Origin": origin, **headers})
        assert (reply.status_code, reply.headers.get("Access-Control-Allow-Origin")) == (status, allowed)
        if allowed:
            assert "X-Task-Id" in reply.headers["Access-Control-Expose-Headers"]
        if origins == ORIGIN:
            assert "Origin" in reply.headers["Vary"]


def test_a_call_without_an_origin_is_not_changed(make_app: MakeApp, redis_url: str) -> None:
    client = make_client(make_app, redis_url, "*")
    reply = client.get("/livez")
    assert not [name for name, _ in reply.headers if name.startswith("Access-Control")]
    assert client.open("/v1/models", method="OPTIONS").status_code == 401


@pytest.mark.parametrize("origins", ["chat.example.com", f"{ORIGIN}/", f"{ORIGIN} https://x/y"])
def test_what_is_not_an_origin_is_refused(redis_url: str, origins: str) -> None:
    with pytest.raises((SettingError, ValueError), match="origins"):
        ApiSettings(redis_url=redis_url, cors_origins=origins)
