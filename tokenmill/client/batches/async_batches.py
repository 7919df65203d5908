"""`AsyncFiles` and `AsyncBatches`: many calls in one file, as parts of an `AsyncClient`."""

import os
from collections.abc import AsyncGenerator, Mapping

from pydantic import PrivateAttr

from tokenmill.client import calls
from tokenmill.client.async_transport import AsyncTransport
from tokenmill.client.batches import requests, steps
from tokenmill.client.batches.replies import BatchFields, BatchResult, Deleted, File
from tokenmill.client.batches.requests import Lines
from tokenmill.client.replies import Page
from tokenmill.client.steps import Request


class AsyncFiles:
    """The files of this API key."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, path: str | os.PathLike[str], *, purpose: str = "batch") -> File:
        """Upload a file. It is not repeated after a lost reply, which could store it twice."""
        return await self._transport.read(requests.upload_of_path(path, purpose), File)

    async def get(self, file_id: str) -> File:
        """The description of a file."""
        return await self._transport.read(Request(method="GET", path=requests.file_path(file_id)), File)

    async def list(self, *, purpose: str | None = None) -> AsyncGenerator[File, None]:
        """All files. Pages are read as needed."""
        params = {} if purpose is None else {"purpose": purpose}
        cursor: str | None = None
        while True:
            page = await self._transport.read(requests.page(requests.FILES, cursor, params), _FilePage)
            for file in page.data:
                yield file
            if not page.has_more or not page.data:
                return
            cursor = page.data[-1].id

    async def delete(self, file_id: str) -> None:
        """Delete a file."""
        await self._transport.read(Request(method="DELETE", path=requests.file_path(file_id)), Deleted)

    def lines(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """The lines of a file, without their line feeds. Reconnects as often as needed."""
        return self._transport.stream(steps.read_lines(file_id, self._transport.policy))


class AsyncBatches:
    """The batches of this API key."""

    def __init__(self, transport: AsyncTransport, files: AsyncFiles) -> None:
        self._transport = transport
        self._files = files

    async def create(
        self,
        lines: Lines,
        *,
        endpoint: str = "/v1/chat/completions",
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> "AsyncBatch":
        """Upload the input and start a batch: a path, or lines. A line is one of the OpenAI API, with its
        `custom_id`, or the body of a call alone, whose `custom_id` is its number from 0.

        Neither step is repeated after a lost reply, which could do the work twice.
        """
        file = await self._upload(lines, endpoint)
        return await self._read(requests.batch_creation(file.id, endpoint, completion_window, metadata))

    async def get(self, batch_id: str) -> "AsyncBatch":
        """The batch now."""
        return await self._read(Request(method="GET", path=requests.batch_path(batch_id)))

    async def wait(self, batch_id: str, *, timeout: float | None = None) -> "AsyncBatch":
        """The batch once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        response = await self._transport.run(steps.wait(batch_id, self._transport.policy, timeout))
        return self._bind(calls.parse(response, AsyncBatch))

    async def cancel(self, batch_id: str) -> "AsyncBatch":
        """Cancel the batch and return it. What has been done is kept."""
        return await self._read(
            Request(method="POST", path=f"{requests.batch_path(batch_id)}/cancel", json={})
        )

    async def list(self) -> "AsyncGenerator[AsyncBatch, None]":
        """All batches, newest first. Pages are read as needed."""
        cursor: str | None = None
        while True:
            page = await self._transport.read(requests.page(requests.BATCHES, cursor, {}), _BatchPage)
            for batch in page.data:
                yield self._bind(batch)
            if not page.has_more or not page.data:
                return
            cursor = page.data[-1].id

    async def results(self, batch_id: str) -> AsyncGenerator[BatchResult, None]:
        """The results of the lines so far: responses first, then errors. Their order is that of the end of
        their work, not of the input: `custom_id` connects them.
        """
        batch = await self.get(batch_id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                async for line in self._files.lines(file_id):
                    if line.strip():
                        yield BatchResult.model_validate_json(line)

    async def _upload(self, lines: Lines, endpoint: str) -> File:
        if isinstance(lines, str | os.PathLike):
            return await self._files.create(lines)
        with requests.write_lines(lines, endpoint) as file:
            return await self._transport.read(requests.upload_of_file(file, "batch.jsonl", "batch"), File)

    async def _read(self, request: Request) -> "AsyncBatch":
        return self._bind(await self._transport.read(request, AsyncBatch))

    def _bind(self, batch: "AsyncBatch") -> "AsyncBatch":
        batch._batches = self
        return batch


class AsyncBatch(BatchFields):
    """A batch. It does not change: `refresh` and `wait` return newer ones."""

    _batches: AsyncBatches = PrivateAttr()

    async def refresh(self) -> "AsyncBatch":
        """The batch as it is now."""
        return await self._batches.get(self.id)

    async def wait(self, *, timeout: float | None = None) -> "AsyncBatch":
        """The batch once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        return await self._batches.wait(self.id, timeout=timeout)

    async def cancel(self) -> "AsyncBatch":
        """Cancel the batch. What has been done is kept."""
        return await self._batches.cancel(self.id)

    def results(self) -> AsyncGenerator[BatchResult, None]:
        """The results of its lines so far, as `AsyncBatches.results` yields them."""
        return self._batches.results(self.id)


class _FilePage(Page[File]):
    pass


class _BatchPage(Page[AsyncBatch]):
    pass
