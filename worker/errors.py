"""The errors that the worker raises on purpose, and how a fault of one request is told to its client."""

from engine.constraints import NO_TOKEN_ALLOWED
from engine.errors import EngineError, InvalidParameter, NeverFits
from engine.structured_outputs import FIELD as STRUCTURED_OUTPUTS
from tokenmill.protocol.messages import TaskError
from tokenmill.settings.errors import SettingError

INVALID_REQUEST = "invalid_request_error"
"""The type of an error that the client can correct."""


class WorkerError(Exception):
    """Base class of every error raised on purpose by the worker."""


def unusable(error: SettingError | EngineError) -> str:
    """One line for an error that a restart does not mend; a parameter is named by its variable."""
    text = str(error)
    if isinstance(error, InvalidParameter):
        text = f"TOKENMILL_{error.field.upper()}: {error.message}"
    return " ".join(text.split())


class RequestRefused(WorkerError):
    """This one request cannot be served; `error` is what its client is told."""

    def __init__(self, error: TaskError) -> None:
        super().__init__(error.message)
        self.error = error


def invalid_request(code: str, message: str, param: str | None = None) -> TaskError:
    """The client can put it right; `param` names the field as it wrote it."""
    return TaskError(type=INVALID_REQUEST, code=code, message=_writable(message), param=param)


def invalid_value(param: str, message: str) -> TaskError:
    return invalid_request("invalid_value", message, param)


def invalid_parameter(error: InvalidParameter, param: str) -> TaskError:
    """What the engine refused, under the name `param` that the client gave it; codes are the API's."""
    code = "context_length_exceeded" if isinstance(error, NeverFits) else "invalid_value"
    return invalid_request(code, f"{param}: {error.message}", param)


def server_error(code: str, message: str) -> TaskError:
    """The client can only try again."""
    return TaskError(type="server_error", code=code, message=_writable(message))


def engine_error(message: str) -> TaskError:
    """What the engine says of a request that it had taken; a field that it names can be put right."""
    if message.startswith(f"{STRUCTURED_OUTPUTS}:"):
        return invalid_value(STRUCTURED_OUTPUTS, message)
    if message == NO_TOKEN_ALLOWED:
        return invalid_request("no_token_allowed", message)
    return server_error("engine_error", message)


def internal_error() -> TaskError:
    """Something that nobody expected; the worker's log has the details, the client gets none of them."""
    return server_error("internal_error", "the worker failed on this request; its log tells why")


def _writable(message: str) -> str:
    """Messages quote what clients wrote, and a lone surrogate cannot be written as UTF-8."""
    return message.encode("utf-8", "replace").decode()
