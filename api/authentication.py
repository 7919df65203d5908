"""Whose call it is: the tenant of the API key that it shows.

Law: where keys are set, no call of `/v1/` gets past here without one; nobody has looked at its body then, and
Redis has not been asked. Knows no task: what a tenant may see is decided where it is looked up.
"""

from typing import Any

from flask import Flask, g, request
from flask_openapi3.models.security_scheme import SecurityScheme

from api.keyring import Keyring
from api.problems import Problem
from tokenmill.protocol.naming import DEFAULT_TENANT

PROTECTED = "/v1/"
SCHEME_NAME = "apiKey"
_DESCRIPTION = "An API key of this service: `Authorization: Bearer <key>`."


def schemes(keyring: Keyring) -> dict[str, SecurityScheme | dict[str, Any]]:
    """As OpenAPI describes them."""
    if not keyring:
        return {}
    return {SCHEME_NAME: {"type": "http", "scheme": "bearer", "description": _DESCRIPTION}}


def install(app: Flask, keyring: Keyring) -> None:
    """Have every call of `app` looked at before anything else is done for it."""

    @app.before_request
    def authenticate() -> None:
        # The rule, where there is one: it is what will answer, however the path is spelled.
        path = request.url_rule.rule if request.url_rule else request.path
        if keyring and path.startswith(PROTECTED):
            g.tenant = _tenant(keyring, request.headers.get("Authorization", ""))


def tenant() -> str:
    """Of the call in progress; `default` where no keys are set."""
    return str(g.get("tenant", DEFAULT_TENANT))


def _tenant(keyring: Keyring, header: str) -> str:
    """Raises `Problem` (401)."""
    scheme, _, key = header.strip().partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise _refusal("missing_api_key", "send an API key of this service as `Authorization: Bearer <key>`")
    found = keyring.tenant_of(key.strip())
    if found is None:
        raise _refusal("invalid_api_key", "this is not an API key of this service")
    return found


def _refusal(code: str, detail: str) -> Problem:
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem(401, code, detail, param="Authorization", headers=headers)
