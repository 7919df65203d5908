"""Lets pages of other origins call the API from a browser (Fetch standard, "CORS protocol").

Without configured origins, no reply has these headers, and browsers refuse such calls.
"""

from collections.abc import Collection

from flask import Flask, Response, request

ANY = "*"
_METHODS = "GET, POST, PUT, DELETE, OPTIONS"
_EXPOSED = "Idempotent-Replayed, Location, Retry-After, X-Request-ID, X-Task-Id"
"""Headers of replies that a page may read, besides those that it always may."""
_MAX_AGE_SECONDS = "600"


def install(app: Flask, origins: Collection[str]) -> None:
    """Answer the preflights of `origins`, before any key is asked for: they never have one."""

    @app.before_request
    def answer_preflight() -> Response | None:
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (is_preflight and _allowed(origins)):
            return None
        response = Response(status=204)
        response.headers["Access-Control-Allow-Methods"] = _METHODS
        response.headers["Access-Control-Max-Age"] = _MAX_AGE_SECONDS
        wanted = request.headers.get("Access-Control-Request-Headers")
        if wanted:
            response.headers["Access-Control-Allow-Headers"] = wanted
        return response

    @app.after_request
    def add_headers(response: Response) -> Response:
        if origins and ANY not in origins:
            response.vary.add("Origin")
        allowed = _allowed(origins)
        if allowed:
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        return response


def _allowed(origins: Collection[str]) -> str | None:
    """The value of `Access-Control-Allow-Origin` for the current call; None if its origin is not allowed."""
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    if ANY in origins:
        return ANY
    return origin if origin in origins else None
