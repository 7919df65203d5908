"""The errors of the HTTP client: one tree, with `ClientError` at its root."""

import email.utils
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.client.replies import TaskFields

MAX_TEXT_BYTES = 65536
"""The part of an error's body that is read."""


class ClientError(Exception):
    """A call failed. `message`: for people. `code`: for programs.

    `status`: the HTTP status, or None without a reply. `request_id`: the id of the call in the logs of the
    service.
    """

    code = "client_error"

    def __init__(self, message: str, *, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.request_id = request_id


class Unreachable(ClientError):
    """No server answers at the address. The call had no effect."""

    code = "unreachable"


class NotTokenmill(Unreachable):
    """Another server answers at the address, or a proxy without the service behind it."""

    code = "not_tokenmill"


class Broken(ClientError):
    """The connection broke, or no reply came in time: the call may or may not have taken effect."""

    code = "connection_broken"


class Refused(ClientError):
    """The service answered with an error status. `param`: the field that is wrong, if one is.

    `retry_after`: seconds after which the service asks for the next attempt. `should_retry`: its advice.
    """

    status: int

    # More parameters than usual: the parts of one reply.
    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, status=status, request_id=request_id)
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.should_retry = should_retry


class InvalidRequest(Refused):
    """Status 400, 409, 413, 422 or another of this class: the request is wrong."""


class NotAuthenticated(Refused):
    """Status 401 or 403: the API key is missing, or is not one of the service."""


class NotFound(Refused):
    """Status 404: there is nothing with this id."""


class Expired(NotFound):
    """Status 410: it existed, and is no longer kept."""


class TooManyRequests(Refused):
    """Status 429: the queue is full, or a limit is reached. Nothing was accepted."""


class ServiceFailed(Refused):
    """Status 500 and above: the service cannot do it now."""


class WaitTimedOut(ClientError):
    """The time given to `wait` or `result` is over. The task continues."""

    code = "wait_timed_out"


class NotCompleted(ClientError):
    """The task failed or was cancelled. `task`: the task as it ended, with the output so far."""

    def __init__(self, task: "TaskFields") -> None:
        error = task.error
        self.task = task
        self.code = error.code if error else task.status
        super().__init__(
            f"the task failed: {error.message} ({error.code})"
            if error
            else f"the task ended as {task.status}"
        )


_CLASSES: dict[int, type[Refused]] = {
    401: NotAuthenticated,
    403: NotAuthenticated,
    404: NotFound,
    410: Expired,
    429: TooManyRequests,
}


def refused(status: int, headers: Mapping[str, str], body: bytes, request_id: str | None) -> Refused:
    """The error of a reply. Its body is problem+json, or anything else if a proxy has answered."""
    fields = _problem(body)
    error = fields.get("error")
    error = error if isinstance(error, dict) else {}
    kind = _CLASSES.get(status, ServiceFailed if status >= 500 else InvalidRequest)
    param = error.get("param")
    return kind(
        str(error.get("message") or f"HTTP {status} of a server that gives no reason"),
        status=status,
        code=str(error.get("code") or "http_error"),
        param=param if isinstance(param, str) else None,
        retry_after=retry_after(headers),
        should_retry={"true": True, "false": False}.get(headers.get("x-should-retry", "").lower()),
        request_id=headers.get("x-request-id") or request_id,
    )


def _problem(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body[:MAX_TEXT_BYTES])
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """The seconds of Retry-After, which is a number of seconds or a date. None: missing or malformed."""
    value = headers.get("retry-after", "")
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - (time.time() if now is None else now))
