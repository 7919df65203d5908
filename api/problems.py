"""What goes wrong, told once for both kinds of client: problem details (RFC 9457) with an `error` object.

Law: every error that leaves this service is such a body, valid JSON, and carries the request's id. The
`error` member is what OpenAI's clients read.
"""

import json
import logging
import math
import re
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import redis
from flask import Flask, Response, current_app, g, request
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.wrappers import Response as BaseResponse

from api.redis_clients import is_unavailable, why_unavailable

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_RETRY_SECONDS = 60
"""Clients give up on a Retry-After that is much longer."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PARAMETER = re.compile(r"<(?:[^:<>]*:)?([^<>]+)>")
_DOCS_FILE = re.compile(r"/docs/.*(?<!json)$(?<!^/docs/)")
_REDIS_RETRY_SECONDS = 5
_SHOWN = 200
"""Characters of a client's own text that a message repeats."""

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}


class Problem(Exception):
    """An answer that is not the one that was asked for.

    `code` is for programs, `detail` for people: what was wrong and what to do. `param` names the field.
    `retry_after`: seconds. `members` are further members of the body.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        self.members = dict(members or {})

    def to_json(self, request_id: str) -> dict[str, Any]:
        error = {
            "type": error_type(self.status),
            "code": self.code,
            "message": self.detail,
            "param": self.param,
        }
        return {
            **self.members,
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "request_id": request_id,
            "error": error,
        }

    def to_response(self) -> Response:
        body = json.dumps(self.to_json(request_id()), allow_nan=False)
        response = Response(body, status=self.status, content_type=MEDIA_TYPE, headers=self.headers)
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(retry_seconds(self.retry_after))
        return response


def bad_field(param: str, detail: str, code: str = "invalid_value") -> Problem:
    """400 that names the field."""
    return Problem(400, code, f"{shown(param)}: {detail}", param=shown(param))


def from_validation(error: ValidationError) -> Problem:
    """The first thing that a schema found wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    code = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(
        first["type"], "invalid_value"
    )
    param = ".".join(str(part) for part in first["loc"])
    message = "unknown field" if code == "unknown_field" else first["msg"].removeprefix("Value error, ")
    return bad_field(param, message, code) if param else Problem(400, code, message)


def error_type(status: int) -> str:
    """The `error.type` that goes with a status."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def retry_seconds(estimate: float | None) -> int:
    """A Retry-After from an estimate in seconds: whole, at least 1, at most what clients accept."""
    if estimate is None or not math.isfinite(estimate):
        return 1
    return max(1, min(MAX_RETRY_SECONDS, math.ceil(estimate)))


def shown(text: str) -> str:
    """A client's text as a message may repeat it."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def request_id() -> str:
    """The id of the call in progress: the client's `X-Request-ID` if it is a sane one, else a new one."""
    if "request_id" not in g:
        given = request.headers.get("X-Request-ID", "")
        g.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return str(g.request_id)


def install(app: Flask) -> None:
    """Make every error of `app` a problem, and name the request in every reply."""
    app.register_error_handler(Problem, Problem.to_response)
    app.register_error_handler(HTTPException, _of_http)
    app.register_error_handler(redis.RedisError, _of_redis)
    app.register_error_handler(Exception, _of_fault)
    app.after_request(_name_request)


def _name_request(response: Response) -> Response:
    response.headers["X-Request-ID"] = request_id()
    return response


def _of_http(error: HTTPException) -> BaseResponse:
    status = error.code or 500
    if status < 400:
        return error.get_response()
    code = _CODES.get(status, "server_error" if status >= 500 else "invalid_request")
    kept = {name: value for name, value in error.get_headers() if name != "Content-Type"}
    if isinstance(error, NotFound):
        return _of_wrong_path(kept)
    detail = error.description or error.name
    if isinstance(error, MethodNotAllowed):
        detail = f"{shown(request.method)} is not allowed here; allowed: {', '.join(_methods(error))}"
    return Problem(status, code, detail, headers=kept).to_response()


def _methods(error: MethodNotAllowed) -> list[str]:
    return sorted(error.valid_methods or ())


def _of_wrong_path(headers: Mapping[str, str]) -> Response:
    """Names what there is: a wrong path is most often a misspelled one."""
    routes = _routes(current_app)
    detail = f"there is no such path; the routes are {', '.join(routes)}"
    return Problem(404, "not_found", detail, headers=headers, members={"routes": routes}).to_response()


def _routes(app: Flask) -> list[str]:
    """Method and path of each, as `GET /v1/tasks/{task_id}`, in the order of the paths."""
    rules = [rule for rule in app.url_map.iter_rules() if not _DOCS_FILE.match(rule.rule)]
    routes = [
        (_PARAMETER.sub(_braces, rule.rule), method)
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    ]
    return [f"{method} {path}" for path, method in sorted(routes)]


def _braces(parameter: re.Match[str]) -> str:
    return "{" + parameter[1] + "}"


def _of_redis(error: redis.RedisError) -> Response:
    if not is_unavailable(error):
        return _of_fault(error)
    # The client has logged the outage, once for all calls.
    detail = f"the task store is not available just now: {why_unavailable(error)}; try again"
    return Problem(503, "store_unavailable", detail, retry_after=_REDIS_RETRY_SECONDS).to_response()


def _of_fault(error: Exception) -> Response:
    logger.error("request %s failed", request_id(), exc_info=error)
    detail = f"a fault of this service; its log names request {request_id()}"
    return Problem(500, "internal_error", detail).to_response()
