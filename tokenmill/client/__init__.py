"""Clients of a running service: `Client` and `AsyncClient` over HTTP, and token streams from Redis.

The names are loaded on first use, so that importing the package loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.client.async_client import AsyncClient, AsyncTask, AsyncTaskSummary
    from tokenmill.client.batches.async_batches import AsyncBatch, AsyncBatches, AsyncFiles
    from tokenmill.client.batches.replies import BatchResult, File
    from tokenmill.client.batches.sync_batches import Batch, Batches, Files
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
    from tokenmill.client.parameters import (
        Message,
        SamplingParameters,
        StructuredOutputs,
        TaskFilters,
        TaskParameters,
    )
    from tokenmill.client.replies import Model, Output, Queue, Usage, Worker
    from tokenmill.client.streams import AsyncTokenStream, TokenStream, UnknownTask
    from tokenmill.client.sync_client import Client, Task, TaskSummary
    from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

_NAMES = {
    "tokenmill.client.async_client": (
        "AsyncClient",
        "AsyncTask",
        "AsyncTaskSummary",
    ),
    "tokenmill.client.batches.async_batches": (
        "AsyncBatch",
        "AsyncBatches",
        "AsyncFiles",
    ),
    "tokenmill.client.batches.replies": (
        "BatchResult",
        "File",
    ),
    "tokenmill.client.batches.sync_batches": (
        "Batch",
        "Batches",
        "Files",
    ),
    "tokenmill.client.errors": (
        "Broken",
        "ClientError",
        "Expired",
        "InvalidRequest",
        "NotAuthenticated",
        "NotCompleted",
        "NotFound",
        "NotTokenmill",
        "Refused",
        "ServiceFailed",
        "TooManyRequests",
        "Unreachable",
        "WaitTimedOut",
    ),
    "tokenmill.client.parameters": (
        "Message",
        "SamplingParameters",
        "StructuredOutputs",
        "TaskFilters",
        "TaskParameters",
    ),
    "tokenmill.client.replies": (
        "Model",
        "Output",
        "Queue",
        "Usage",
        "Worker",
    ),
    "tokenmill.client.streams": (
        "AsyncTokenStream",
        "TokenStream",
        "UnknownTask",
    ),
    "tokenmill.client.sync_client": (
        "Client",
        "Task",
        "TaskSummary",
    ),
    "tokenmill.protocol.messages": (
        "Event",
        "FinishedEvent",
        "TokenEvent",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AsyncBatch",
    "AsyncBatches",
    "AsyncClient",
    "AsyncFiles",
    "AsyncTask",
    "AsyncTaskSummary",
    "AsyncTokenStream",
    "Batch",
    "BatchResult",
    "Batches",
    "Broken",
    "Client",
    "ClientError",
    "Event",
    "Expired",
    "File",
    "Files",
    "FinishedEvent",
    "InvalidRequest",
    "Message",
    "Model",
    "NotAuthenticated",
    "NotCompleted",
    "NotFound",
    "NotTokenmill",
    "Output",
    "Queue",
    "Refused",
    "SamplingParameters",
    "ServiceFailed",
    "StructuredOutputs",
    "Task",
    "TaskFilters",
    "TaskParameters",
    "TaskSummary",
    "TokenEvent",
    "TokenStream",
    "TooManyRequests",
    "UnknownTask",
    "Unreachable",
    "Usage",
    "WaitTimedOut",
    "Worker",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
