"""Authenticates calls: maps the API key of a call to its tenant.

Where API keys are set, a call of `/v1/` without a valid one is refused before its body is read and before
Redis is asked.
"""

from collections.abc import Mapping
from typing import Any

from flask import Flask, g, request
from flask_openapi3.models.security_scheme import SecurityScheme
from werkzeug.datastructures import Headers

from api.problems import Problem
from tokenmill.protocol.naming import DEFAULT_TENANT
from tokenmill.settings.credentials import Keyring

PROTECTED_PREFIX = "/v1/"
SCHEME_NAME = "apiKey"
OTHER_HEADERS = ("api-key", "x-api-key")
"""Headers in which clients of Azure's and of Anthropic's API send the key alone."""
_DESCRIPTION = "An API key of this service: `Authorization: Bearer <key>`."


def schemes(keyring: Keyring) -> dict[str, SecurityScheme | dict[str, Any]]:
    """The OpenAPI description of the authentication; empty without keys."""
    if not keyring:
        return {}
    return {SCHEME_NAME: {"type": "http", "scheme": "bearer", "description": _DESCRIPTION}}


def install(app: Flask, keyring: Keyring) -> None:
    """Authenticate every call of `app` before anything else is done for it."""

    @app.before_request
    def authenticate() -> None:
        # The matched rule, not the path: a path may be written in several ways.
        path = request.url_rule.rule if request.url_rule else request.path
        if keyring and path.startswith(PROTECTED_PREFIX):
            g.tenant = _authenticate(keyring, _credentials(request.headers))


def current_tenant() -> str:
    """The tenant of the current call; `default` without keys."""
    return str(g.get("tenant", DEFAULT_TENANT))


def check_upload(keyring: Keyring, headers: Mapping[str, str]) -> None:
    """Refuse an upload without a valid key before its body is stored. Raises `Problem` (401).

    `headers`: names as in WSGI, without `HTTP_`.
    """
    if keyring:
        named = Headers([(name.replace("_", "-"), value) for name, value in headers.items()])
        _authenticate(keyring, _credentials(named))


def _credentials(headers: Headers) -> str:
    """The value of `Authorization`, also for a key that was sent in another header."""
    found = next((headers[name] for name in OTHER_HEADERS if name in headers), None)
    return headers.get("Authorization") or (f"Bearer {found}" if found else "")


def _authenticate(keyring: Keyring, header: str) -> str:
    """Return the tenant. Raises `Problem` (401)."""
    scheme, _, key = header.strip().partition(" ")
    if scheme.lower() != "bearer" or not key:
        detail = "send an API key of this service as `Authorization: Bearer <key>`"
        raise _unauthorized("missing_api_key", detail)
    tenant = keyring.tenant_of(key.strip())
    if tenant is None:
        raise _unauthorized("invalid_api_key", "this is not an API key of this service")
    return tenant


def _unauthorized(code: str, detail: str) -> Problem:
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem(401, code, detail, param="Authorization", headers=headers)
