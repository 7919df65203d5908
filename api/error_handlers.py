"""Turns every exception of the application into a problem, and puts the request's id on every reply."""

import re
from collections.abc import Mapping

import redis
import structlog
from flask import Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.wrappers import Response as BaseResponse

from api.problems import Problem, excerpt, request_id
from api.redis_clients import is_unavailable, why_unavailable

_log = structlog.get_logger(__name__)

_PARAMETER = re.compile(r"<(?:[^:<>]*:)?([^<>]+)>")
_DOCS_FILE = re.compile(r"/docs/.*(?<!json)$(?<!^/docs/)")
_REDIS_RETRY_SECONDS = 5
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}


def install(app: Flask) -> None:
    """Register the handlers with `app`."""
    app.register_error_handler(Problem, Problem.to_response)
    app.register_error_handler(HTTPException, _from_http)
    app.register_error_handler(redis.RedisError, _from_redis)
    app.register_error_handler(Exception, _from_exception)
    app.after_request(_add_request_id)


def _add_request_id(response: Response) -> Response:
    response.headers["X-Request-ID"] = request_id()
    return response


def _from_http(error: HTTPException) -> BaseResponse:
    status = error.code or 500
    if status < 400:
        return error.get_response()
    code = _CODES.get(status, "server_error" if status >= 500 else "invalid_request")
    headers = {name: value for name, value in error.get_headers() if name != "Content-Type"}
    if isinstance(error, NotFound):
        return _unknown_path(headers)
    detail = error.description or error.name
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        detail = f"{excerpt(request.method)} is not allowed here; allowed: {allowed}"
    return Problem(status, code, detail, headers=headers).to_response()


def _unknown_path(headers: Mapping[str, str]) -> Response:
    """List the routes: an unknown path is most often misspelled."""
    routes = _routes(current_app)
    detail = f"there is no such path; the routes are {', '.join(routes)}"
    return Problem(404, "not_found", detail, headers=headers, members={"routes": routes}).to_response()


def _routes(app: Flask) -> list[str]:
    """Method and path of each route, such as `GET /v1/tasks/{task_id}`, sorted by path."""
    rules = [rule for rule in app.url_map.iter_rules() if not _DOCS_FILE.match(rule.rule)]
    routes = [
        (_PARAMETER.sub(_braces, rule.rule), method)
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    ]
    return [f"{method} {path}" for path, method in sorted(routes)]


def _braces(parameter: re.Match[str]) -> str:
    return "{" + parameter[1] + "}"


def _from_redis(error: redis.RedisError) -> Response:
    if not is_unavailable(error):
        return _from_exception(error)
    # The client has logged the outage, once for all calls.
    detail = f"the task store is unavailable: {why_unavailable(error)}; try again"
    return Problem(503, "store_unavailable", detail, retry_after=_REDIS_RETRY_SECONDS).to_response()


def _from_exception(error: Exception) -> Response:
    _log.error("request failed", request_id=request_id(), exc_info=error)
    detail = f"internal error; the log of this service has details under request {request_id()}"
    return Problem(500, "internal_error", detail).to_response()
