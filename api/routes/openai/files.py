"""The routes of `/v1/files`."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any

from flask import Response, request
from flask_openapi3.blueprint import APIBlueprint

from api.authentication import SCHEME_NAME
from api.file_storage import CHUNK_BYTES
from api.problems import Problem
from api.routes.openai.completions import TAG
from api.routes.openai.file_services import (
    FileServices,
    json_reply,
    new_id,
    no_file,
    own_hash,
    page_members,
)
from api.routes.openai.upload_form import read_upload
from api.routes.slots import stream_slot
from api.schemas.openai.files import FileDeleted, FileList, FilePath, FilesQuery, FileView
from api.schemas.replies import PROBLEM_REPLY
from tokenmill.protocol.batch_records import FileRecord
from tokenmill.protocol.store.file_index import PageQuery

_CONTENT: dict[Any, Any] = {
    200: {"description": "The bytes of the file.", "content": {"application/octet-stream": {}}}
}
_RETRY_SECONDS = 5


def file_routes(services: FileServices) -> APIBlueprint:
    """The blueprint of `/v1/files`."""
    files = _Files(services)
    routes = APIBlueprint(
        "files",
        __name__,
        url_prefix="/v1/files",
        abp_tags=[TAG],
        abp_security=[{SCHEME_NAME: []}] if services.tasks.settings.keyring else None,
        abp_responses={"default": PROBLEM_REPLY},
    )

    @routes.post("", summary="Upload a file", responses={200: FileView})
    def upload() -> Response:
        """A form (`multipart/form-data`) with `purpose`, which is `batch`, and `file`: JSON lines. Optional:
        `expires_after[anchor]`, which is `created_at`, and `expires_after[seconds]`.
        """
        return files.upload()

    @routes.get("", summary="List files", responses={200: FileList})
    def list_files(query: FilesQuery) -> Response:
        """The files that were uploaded, and the results of batches."""
        return files.list(query)

    @routes.get("/<file_id>", summary="Get a file", responses={200: FileView})
    def get_file(path: FilePath) -> Response:
        """What is known of a file, without its content."""
        return json_reply(_view(services.file(path.file_id)))

    @routes.get("/<file_id>/content", summary="Get the content of a file", responses=_CONTENT)
    def get_content(path: FilePath) -> Response:
        """The bytes of a file."""
        return files.content(path.file_id)

    @routes.delete("/<file_id>", summary="Delete a file", responses={200: FileDeleted})
    def delete(path: FilePath) -> Response:
        """409 for the input of a batch that has not ended."""
        return files.delete(path.file_id)

    return routes


class _Files:
    """The handlers of `file_routes`."""

    def __init__(self, services: FileServices) -> None:
        self._services = services
        self._settings = services.tasks.settings

    def upload(self) -> Response:
        """The content is stored before the record, so a file that is visible is whole."""
        file_id, now = new_id("file-"), time.time()
        try:
            form = read_upload(request, self._services.storage, file_id, self._settings.max_file_bytes)
            with form.file as file:
                file.commit()
        except OSError as error:
            raise _unavailable(error) from error
        seconds = self._settings.files_retention_seconds if form.seconds is None else form.seconds
        record = FileRecord(
            id=file_id,
            tenant=own_hash(),
            purpose=form.purpose,
            filename=form.filename,
            size=file.size,
            created_at=now,
            expires_at=now + seconds,
        )
        self._services.files.put(record)
        return json_reply(_view(record))

    def list(self, query: FilesQuery) -> Response:
        wanted = PageQuery(
            tenant=own_hash(),
            after=query.after,
            limit=query.limit,
            order=query.order,
            purpose=query.purpose,
        )
        records, has_more = self._services.files.page(wanted)
        now = time.time()
        views = [_view(record) for record in records if record.expires_at > now]
        return json_reply(FileList(data=views, has_more=has_more, **page_members(views)))

    def content(self, file_id: str) -> Response:
        record = self._services.file(file_id)
        headers = {"Content-Length": str(record.size)}
        kind = "application/octet-stream"
        if request.method == "HEAD":
            # The body of a reply to HEAD is never iterated, so nothing would release a slot.
            return Response(headers=headers, content_type=kind)
        with ExitStack() as stack:
            stack.enter_context(stream_slot(self._services.tasks))
            try:
                file = stack.enter_context(self._services.storage.open(file_id))
            except FileNotFoundError as error:
                raise no_file("file_id") from error
            except OSError as error:
                raise _unavailable(error) from error
            response = Response(_chunks(file), headers=headers, content_type=kind)
            response.call_on_close(stack.pop_all().close)
            return response

    def delete(self, file_id: str) -> Response:
        record = self._services.file(file_id)
        removal = self._services.files.remove(file_id, record.tenant)
        if removal == "in_use":
            detail = "the file is the input of a batch that has not ended; cancel the batch first"
            raise Problem(409, "file_in_use", detail, param="file_id")
        if removal == "missing":
            raise no_file("file_id")
        try:
            self._services.storage.delete(file_id)
        except OSError as error:
            # The record is gone: the content is deleted as an orphan.
            raise _unavailable(error) from error
        return json_reply(FileDeleted(id=file_id))


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _view(record: FileRecord) -> FileView:
    return FileView(
        id=record.id,
        bytes=record.size,
        created_at=int(record.created_at),
        expires_at=int(record.expires_at),
        filename=record.filename,
        purpose=record.purpose,
    )


def _unavailable(error: OSError) -> Problem:
    detail = f"the storage of files is unavailable: {error.strerror or error}"
    return Problem(503, "storage_unavailable", detail, retry_after=_RETRY_SECONDS)
