"""`Files` and `Batches`: many calls in one file, as parts of a `Client`."""

import os
from collections.abc import Generator, Mapping

from pydantic import PrivateAttr

from tokenmill.client import calls
from tokenmill.client.batches import requests, steps
from tokenmill.client.batches.replies import BatchFields, BatchResult, Deleted, File
from tokenmill.client.batches.requests import Lines
from tokenmill.client.replies import Page
from tokenmill.client.steps import Request
from tokenmill.client.sync_transport import SyncTransport


class Files:
    """The files of this API key."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(self, path: str | os.PathLike[str], *, purpose: str = "batch") -> File:
        """Upload a file. It is not repeated after a lost reply, which could store it twice."""
        return self._transport.read(requests.upload_of_path(path, purpose), File)

    def get(self, file_id: str) -> File:
        """The description of a file."""
        return self._transport.read(Request(method="GET", path=requests.file_path(file_id)), File)

    def list(self, *, purpose: str | None = None) -> Generator[File, None, None]:
        """All files. Pages are read as needed."""
        params = {} if purpose is None else {"purpose": purpose}
        cursor: str | None = None
        while True:
            page = self._transport.read(requests.page(requests.FILES, cursor, params), _FilePage)
            yield from page.data
            if not page.has_more or not page.data:
                return
            cursor = page.data[-1].id

    def delete(self, file_id: str) -> None:
        """Delete a file."""
        self._transport.read(Request(method="DELETE", path=requests.file_path(file_id)), Deleted)

    def lines(self, file_id: str) -> Generator[bytes, None, None]:
        """The lines of a file, without their line feeds. Reconnects as often as needed."""
        return self._transport.stream(steps.read_lines(file_id, self._transport.policy))


class Batches:
    """The batches of this API key."""

    def __init__(self, transport: SyncTransport, files: Files) -> None:
        self._transport = transport
        self._files = files

    def create(
        self,
        lines: Lines,
        *,
        endpoint: str = "/v1/chat/completions",
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> "Batch":
        """Upload the input and start a batch: a path, or lines. A line is one of the OpenAI API, with its
        `custom_id`, or the body of a call alone, whose `custom_id` is its number from 0.

        Neither step is repeated after a lost reply, which could do the work twice.
        """
        file = self._upload(lines, endpoint)
        return self._read(requests.batch_creation(file.id, endpoint, completion_window, metadata))

    def get(self, batch_id: str) -> "Batch":
        """The batch now."""
        return self._read(Request(method="GET", path=requests.batch_path(batch_id)))

    def wait(self, batch_id: str, *, timeout: float | None = None) -> "Batch":
        """The batch once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        response = self._transport.run(steps.wait(batch_id, self._transport.policy, timeout))
        return self._bind(calls.parse(response, Batch))

    def cancel(self, batch_id: str) -> "Batch":
        """Cancel the batch and return it. What has been done is kept."""
        return self._read(Request(method="POST", path=f"{requests.batch_path(batch_id)}/cancel", json={}))

    def list(self) -> "Generator[Batch, None, None]":
        """All batches, newest first. Pages are read as needed."""
        cursor: str | None = None
        while True:
            page = self._transport.read(requests.page(requests.BATCHES, cursor, {}), _BatchPage)
            for batch in page.data:
                yield self._bind(batch)
            if not page.has_more or not page.data:
                return
            cursor = page.data[-1].id

    def results(self, batch_id: str) -> Generator[BatchResult, None, None]:
        """The results of the lines so far: responses first, then errors. Their order is that of the end of
        their work, not of the input: `custom_id` connects them.
        """
        batch = self.get(batch_id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                for line in self._files.lines(file_id):
                    if line.strip():
                        yield BatchResult.model_validate_json(line)

    def _upload(self, lines: Lines, endpoint: str) -> File:
        if isinstance(lines, str | os.PathLike):
            return self._files.create(lines)
        with requests.write_lines(lines, endpoint) as file:
            return self._transport.read(requests.upload_of_file(file, "batch.jsonl", "batch"), File)

    def _read(self, request: Request) -> "Batch":
        return self._bind(self._transport.read(request, Batch))

    def _bind(self, batch: "Batch") -> "Batch":
        batch._batches = self
        return batch


class Batch(BatchFields):
    """A batch. It does not change: `refresh` and `wait` return newer ones."""

    _batches: Batches = PrivateAttr()

    def refresh(self) -> "Batch":
        """The batch as it is now."""
        return self._batches.get(self.id)

    def wait(self, *, timeout: float | None = None) -> "Batch":
        """The batch once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        return self._batches.wait(self.id, timeout=timeout)

    def cancel(self) -> "Batch":
        """Cancel the batch. What has been done is kept."""
        return self._batches.cancel(self.id)

    def results(self) -> Generator[BatchResult, None, None]:
        """The results of its lines so far, as `Batches.results` yields them."""
        return self._batches.results(self.id)


class _FilePage(Page[File]):
    pass


class _BatchPage(Page[Batch]):
    pass
