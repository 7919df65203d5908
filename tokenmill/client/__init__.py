"""Clients of a running service: `Client` and `AsyncClient` over HTTP, and token streams from Redis.

The names are loaded on first use, so that importing the package loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.client.async_client import AsyncClient, AsyncTask, AsyncTaskSummary
    from tokenmill.client.errors import (
        Broken,
        ClientError,
        Expired,
        InvalidRequest,
        NotAuthenticated,
        NotCompleted,
        NotFound,
        NotTokenmill,
        Refused,
        ServiceFailed,
        TooManyRequests,
        Unreachable,
        WaitTimedOut,
    )
    from tokenmill.client.parameters import Message, SamplingParameters, TaskFilters, TaskParameters
    from tokenmill.client.streams import AsyncTokenStream, TokenStream, UnknownTask
    from tokenmill.client.sync_client import Client, Task, TaskSummary
    from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

_ERRORS = (
    "Broken", "ClientError", "Expired", "InvalidRequest", "NotAuthenticated", "NotCompleted", "NotFound",
    "NotTokenmill", "Refused", "ServiceFailed", "TooManyRequests", "Unreachable", "WaitTimedOut",
)  # fmt: skip
_MODULES = {
    **dict.fromkeys(("AsyncClient", "AsyncTask", "AsyncTaskSummary"), "tokenmill.client.async_client"),
    **dict.fromkeys(_ERRORS, "tokenmill.client.errors"),
    **dict.fromkeys(
        ("Message", "SamplingParameters", "TaskFilters", "TaskParameters"), "tokenmill.client.parameters"
    ),
    **dict.fromkeys(("AsyncTokenStream", "TokenStream", "UnknownTask"), "tokenmill.client.streams"),
    **dict.fromkeys(("Client", "Task", "TaskSummary"), "tokenmill.client.sync_client"),
    **dict.fromkeys(("Event", "FinishedEvent", "TokenEvent"), "tokenmill.protocol.messages"),
}

__all__ = [
    "AsyncClient",
    "AsyncTask",
    "AsyncTaskSummary",
    "AsyncTokenStream",
    "Broken",
    "Client",
    "ClientError",
    "Event",
    "Expired",
    "FinishedEvent",
    "InvalidRequest",
    "Message",
    "NotAuthenticated",
    "NotCompleted",
    "NotFound",
    "NotTokenmill",
    "Refused",
    "SamplingParameters",
    "ServiceFailed",
    "Task",
    "TaskFilters",
    "TaskParameters",
    "TaskSummary",
    "TokenEvent",
    "TokenStream",
    "TooManyRequests",
    "UnknownTask",
    "Unreachable",
    "WaitTimedOut",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
