"""What the routes of files and of batches share."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flask import Response
from pydantic import BaseModel

from api.authentication import current_tenant
from api.file_storage import FileStorage
from api.problems import Problem
from api.routes.task_services import TaskServices
from tokenmill.protocol import naming
from tokenmill.protocol.batch_records import FileRecord
from tokenmill.protocol.store.batch_store import BatchStore
from tokenmill.protocol.store.file_index import FileIndex


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FileServices:
    """`files`, `batches`: the records in Redis. `storage`: the content of the files."""

    tasks: TaskServices
    files: FileIndex
    batches: BatchStore
    storage: FileStorage

    def file(self, file_id: str) -> FileRecord:
        """A file of the tenant of the call. Raises `Problem` (404)."""
        record = self.files.get(file_id, own_hash())
        if record is None or record.expires_at <= time.time():
            raise no_file("file_id")
        return record


def own_hash() -> str:
    """The hash of the tenant of the current call."""
    return naming.tenant_hash(current_tenant())


def no_file(param: str) -> Problem:
    """The reply for a missing file."""
    return Problem(404, "file_not_found", "there is no such file, or it has expired", param=param)


def new_id(prefix: str) -> str:
    """An id that sorts by time, with a random part."""
    return f"{prefix}{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


def page_members(items: Sequence[_HasId]) -> dict[str, Any]:
    """The ids of the first and the last item of a page."""
    return {
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
    }


def json_reply(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), content_type="application/json")
