"""Which errors each operation can answer with: one table, from which the document's replies are written."""

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

from api.problems import MEDIA_TYPE, Problem

_SUBMITTING = frozenset({"/v1/tasks", "/v1/chat/completions", "/v1/completions", "/v1/responses"})
_WAITING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class Operation(NamedTuple):
    """What decides which errors an operation has. `is_secured`: calls need an API key."""

    path: str
    method: str
    has_body: bool
    has_parameters: bool
    is_secured: bool

    @property
    def submits(self) -> bool:
        return self.method == "post" and self.path in _SUBMITTING

    @property
    def waits(self) -> bool:
        """Whether the reply is that of a task which has ended."""
        return self.method == "post" and self.path in _WAITING

    @property
    def names_task(self) -> bool:
        return "{task_id}" in self.path or "{response_id}" in self.path

    @property
    def streams(self) -> bool:
        return (
            self.path.endswith(("/events", "/steps", "/content")) or "/responses" in self.path or self.waits
        )


class Error(NamedTuple):
    """One `error.code` of a status, when it comes, and which operations have it."""

    status: int
    code: str
    when: str
    applies: Callable[[Operation], bool]


def _always(_: Operation) -> bool:
    return True


def _uses_redis(operation: Operation) -> bool:
    return operation.path.startswith("/v1/") or operation.path in ("/readyz", "/health", "/metrics")


def _validates(operation: Operation) -> bool:
    return operation.has_body or operation.has_parameters


def _names_file(operation: Operation) -> bool:
    return "{file_id}" in operation.path or _creates_batch(operation)


def _deletes_file(operation: Operation) -> bool:
    return operation.method == "delete" and "{file_id}" in operation.path


def _creates_batch(operation: Operation) -> bool:
    return operation.method == "post" and operation.path == "/v1/batches"


def _uploads(operation: Operation) -> bool:
    return operation.method == "post" and operation.path == "/v1/files"


def _stores(operation: Operation) -> bool:
    return _uploads(operation) or "{file_id}" in operation.path


ERRORS = (
    Error(400, "bad_request", "The request is not valid HTTP.", _always),
    Error(400, "invalid_value", "A parameter or field has a value that is not allowed.", _validates),
    Error(400, "missing_field", "A required field is missing.", lambda one: one.has_body),
    Error(400, "unknown_field", "The body has a field that does not exist.", lambda one: one.has_body),
    Error(400, "invalid_json", "The body is not a JSON object.", lambda one: one.has_body),
    Error(400, "unreadable_body", "The body ends too early.", lambda one: one.has_body),
    Error(400, "context_length_exceeded", "The prompt is too long for the model.", lambda one: one.submits),
    Error(400, "webhooks_disabled", "The service has no secret to sign webhooks.", lambda one: one.submits),
    Error(400, "webhook_address", "The webhook is not at a public address.", lambda one: one.submits),
    Error(400, "invalid_form", "The form is not valid.", _uploads),
    Error(401, "missing_api_key", "The call has no API key.", lambda one: one.is_secured),
    Error(401, "invalid_api_key", "The API key is not one of this service.", lambda one: one.is_secured),
    Error(
        404,
        "model_not_found",
        "The service does not serve this model.",
        lambda one: one.submits or "{model}" in one.path,
    ),
    Error(404, "task_not_found", "There is no such task of this tenant.", lambda one: one.names_task),
    Error(404, "lost", "Redis lost the data of the task.", lambda one: one.names_task),
    Error(404, "worker_not_found", "There is no such worker.", lambda one: "{name}" in one.path),
    Error(404, "file_not_found", "There is no such file, or it has expired.", _names_file),
    Error(404, "batch_not_found", "There is no such batch.", lambda one: "{batch_id}" in one.path),
    Error(408, "body_timeout", "The request did not arrive completely in time.", _always),
    Error(409, "task_cancelled", "The task was cancelled while the call waited.", lambda one: one.waits),
    Error(409, "file_in_use", "A batch that has not ended reads the file.", _deletes_file),
    Error(409, "batch_ended", "The batch has ended.", lambda one: one.path.endswith("{batch_id}/cancel")),
    Error(410, "task_expired", "The task ended too long ago, or was deleted.", lambda one: one.names_task),
    Error(413, "body_too_large", "The body is larger than `TOKENMILL_MAX_BODY_BYTES`.", _always),
    Error(413, "file_too_large", "The file is larger than `TOKENMILL_MAX_FILE_BYTES`.", _uploads),
    Error(414, "url_too_long", "The request line is too long.", _always),
    Error(415, "unsupported_media_type", "The body is not `application/json`.", lambda one: one.has_body),
    Error(415, "unsupported_encoding", "The body is compressed.", lambda one: one.has_body),
    Error(415, "unsupported_charset", "The body is not UTF-8.", lambda one: one.has_body),
    Error(417, "expectation_failed", "`Expect` is not `100-continue`.", _always),
    Error(422, "idempotency_key_reused", "The key was used with another body.", lambda one: one.submits),
    Error(429, "queue_full", "Too many tasks or tokens wait.", lambda one: one.submits),
    Error(429, "too_many_batches", "Too many batches of the tenant have not ended.", _creates_batch),
    Error(431, "head_too_large", "The head of the request is too large.", _always),
    Error(500, "internal_error", "A fault of the service; its log names the request id.", _always),
    Error(500, "engine_error", "A fault of the worker in this task.", lambda one: one.waits),
    Error(500, "task_lost", "The task vanished while the call waited.", lambda one: one.waits),
    Error(503, "busy", "All threads or slots are in use.", _always),
    Error(503, "store_unavailable", "Redis does not answer.", _uses_redis),
    Error(503, "not_ready", "No worker is ready.", lambda one: one.path in ("/readyz", "/health")),
    Error(503, "too_many_streams", "Too many calls stream or wait.", lambda one: one.streams),
    Error(503, "stopping", "The service is stopping; the task continues.", lambda one: one.waits),
    Error(503, "storage_unavailable", "The storage of files does not answer.", _stores),
    Error(504, "timeout", "The task reached a time limit of its own.", lambda one: one.waits),
    Error(505, "http_version_not_supported", "The request is not HTTP/1.1 or HTTP/1.0.", _always),
)  # fmt: skip
REQUEST_ID = "1a2b3c4d5e6f47089a0b1c2d3e4f5a6b"


def error_replies(operation: Operation) -> dict[str, Any]:
    """The replies of an operation by status, each with its codes and an example of each."""
    by_status: dict[int, list[Error]] = {}
    for error in ERRORS:
        if error.applies(operation):
            by_status.setdefault(error.status, []).append(error)
    return {str(status): _reply(status, errors) for status, errors in by_status.items()}


def _reply(status: int, errors: Iterable[Error]) -> dict[str, Any]:
    codes = " ".join(f"`{error.code}`: {error.when}" for error in errors)
    examples = {error.code: {"$ref": f"#/components/examples/{error.code}"} for error in errors}
    reply: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}. {codes}",
        "content": {
            MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemView"}, "examples": examples}
        },
    }
    if status in (429, 503):
        header = {"description": "Seconds until a new attempt may succeed.", "schema": {"type": "integer"}}
        reply["headers"] = {"Retry-After": header}
    return reply


def error_examples() -> dict[str, Any]:
    """The body of each error, for `components/examples`."""
    return {
        error.code: {
            "summary": error.when,
            "value": Problem(error.status, error.code, error.when).to_json(REQUEST_ID),
        }
        for error in ERRORS
    }
