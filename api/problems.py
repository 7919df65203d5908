"""Errors as problem details (RFC 9457), with the `error` object that OpenAI's clients read.

Every error of this service has this body: valid JSON that carries the id of the request.
"""

import json
import math
import re
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from flask import Response, g, request
from pydantic import ValidationError

MEDIA_TYPE = "application/problem+json"
MAX_RETRY_SECONDS = 60
"""Clients ignore a Retry-After that is much longer."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_EXCERPT_CHARACTERS = 200


class Problem(Exception):
    """An error reply.

    `code` is for programs. `detail` is for people: what is wrong and what to do about it. `param` names the
    field. `retry_after`: seconds. `members`: further members of the body.
    """

    # More parameters than usual: the parts of one reply, most of them optional.
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
    """A 400 that names the field."""
    return Problem(400, code, f"{excerpt(param)}: {detail}", param=excerpt(param))


def from_validation(error: ValidationError) -> Problem:
    """A 400 for the first error that pydantic found."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    code = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(
        first["type"], "invalid_value"
    )
    param = ".".join(str(part) for part in first["loc"])
    message = "unknown field" if code == "unknown_field" else first["msg"].removeprefix("Value error, ")
    return bad_field(param, message, code) if param else Problem(400, code, message)


def error_type(status: int) -> str:
    """The `error.type` of a status."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def retry_seconds(estimate: float | None) -> int:
    """The Retry-After for an estimate in seconds: a whole number from 1 to `MAX_RETRY_SECONDS`."""
    if estimate is None or not math.isfinite(estimate):
        return 1
    return max(1, min(MAX_RETRY_SECONDS, math.ceil(estimate)))


def excerpt(text: str) -> str:
    """The beginning of a client's text, for a message."""
    return text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "..."


def request_id() -> str:
    """The id of the current call: the client's `X-Request-ID` if it is well-formed, else a new one."""
    if "request_id" not in g:
        received = request.headers.get("X-Request-ID", "")
        g.request_id = received if _REQUEST_ID.fullmatch(received) else uuid.uuid4().hex
    return str(g.request_id)
