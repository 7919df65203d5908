"""The errors that the worker raises on purpose, and how a failed request is reported to its client."""

from engine.constraints import NO_TOKEN_ALLOWED
from engine.errors import EngineError, InvalidParameter, NeverFits
from engine.structured_outputs import FIELD as STRUCTURED_OUTPUTS
from tokenmill.protocol.messages import TaskError
from tokenmill.settings.errors import SettingError

INVALID_REQUEST = "invalid_request_error"
"""Type of an error that the client can correct."""


class WorkerError(Exception):
    """Base class of the errors that the worker raises on purpose."""


class RequestRefused(WorkerError):
    """This request cannot be served. `error` is sent to its client."""

    def __init__(self, error: TaskError) -> None:
        super().__init__(error.message)
        self.error = error


def settings_message(error: SettingError | EngineError) -> str:
    """One line for an error that a restart does not fix. A parameter is named by its variable."""
    text = str(error)
    if isinstance(error, InvalidParameter):
        text = f"TOKENMILL_{error.field.upper()}: {error.message}"
    return " ".join(text.split())


def invalid_request(code: str, message: str, param: str | None = None) -> TaskError:
    """An error that the client can correct. `param` is the field's name in the request."""
    return TaskError(type=INVALID_REQUEST, code=code, message=_encodable(message), param=param)


def invalid_value(param: str, message: str) -> TaskError:
    return invalid_request("invalid_value", message, param)


def invalid_parameter(error: InvalidParameter, param: str) -> TaskError:
    """A parameter that the engine rejected. `param` is its name in the request."""
    code = "context_length_exceeded" if isinstance(error, NeverFits) else "invalid_value"
    return invalid_request(code, f"{param}: {error.message}", param)


def server_error(code: str, message: str) -> TaskError:
    """An error that the client cannot correct. It can only send the request again."""
    return TaskError(type="server_error", code=code, message=_encodable(message))


def engine_error(message: str) -> TaskError:
    """An error that ended a request in the engine. The engine reports it as text only."""
    if message.startswith(f"{STRUCTURED_OUTPUTS}:"):
        return invalid_value(STRUCTURED_OUTPUTS, message)
    if message == NO_TOKEN_ALLOWED:
        return invalid_request("no_token_allowed", message)
    return server_error("engine_error", message)


def internal_error() -> TaskError:
    """An unexpected error. Its details are in the worker's log only."""
    return server_error("internal_error", "the worker failed on this request; its log has the details")


def _encodable(message: str) -> str:
    """Replace lone surrogates, which may come from the client's text and cannot be encoded as UTF-8."""
    return message.encode("utf-8", "replace").decode()
