"""`AsyncClient`: the HTTP API for asyncio, and the tasks that it returns."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import httpx
from pydantic import BaseModel, PrivateAttr

from tokenmill.client import calls, event_steps, requests
from tokenmill.client.address import Address
from tokenmill.client.async_transport import AsyncTransport
from tokenmill.client.batches.async_batches import AsyncBatches, AsyncFiles
from tokenmill.client.calls import RetryPolicy
from tokenmill.client.errors import ClientError, NotCompleted
from tokenmill.client.parameters import TaskFilters, TaskParameters
from tokenmill.client.replies import (
    Model,
    Models,
    Page,
    Queue,
    TaskFields,
    TaskSummaryFields,
    Worker,
    Workers,
)
from tokenmill.client.steps import Request
from tokenmill.protocol.messages import Event


class AsyncClient:
    """`Client` for asyncio, with the same arguments and methods. Close it, or use it in `async with`.

    It belongs to one event loop. To leave a stream or a list early, wrap it in `contextlib.aclosing`, as for
    every asynchronous generator. Every method raises `ClientError`.
    """

    _sleep: Callable[[float], Awaitable[None]] = staticmethod(asyncio.sleep)
    _clock: Callable[[], float] = staticmethod(time.monotonic)

    # More parameters than usual: each is optional.
    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        max_retries: int = 2,
        patience: float = 60.0,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        """Raises ValueError for an address or a key that cannot be used."""
        address = Address.resolve(base_url, api_key)
        policy = RetryPolicy(max_retries=max_retries, patience=patience, clock=self._clock)
        self._transport = AsyncTransport(
            address, policy, timeout=timeout, sleep=self._sleep, http=http_client
        )
        self.files = AsyncFiles(self._transport)
        self.batches = AsyncBatches(self._transport, self.files)

    @property
    def base_url(self) -> str:
        return self._transport.address.base_url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def submit(
        self,
        prompt: str | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[TaskParameters],
    ) -> "AsyncTask":
        """Submit a task: text to continue, or `messages` or `prompt_token_ids` instead.

        The idempotency key, by default a new one, makes retries return the task of the first attempt.
        """
        return await self._task(requests.submission(prompt, idempotency_key, fields))

    async def get(self, task_id: str, *, wait: float = 0.0, include_prompt: bool = False) -> "AsyncTask":
        """The task now; with `wait`, once it has ended or after that many seconds, at most 60."""
        return await self._task(requests.one_task(task_id, wait, include_prompt=include_prompt))

    async def wait(self, task_id: str, *, timeout: float | None = None) -> "AsyncTask":
        """The task once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        return self._bind(
            await self._transport.run(
                calls.wait(requests.task_path(task_id), self._transport.policy, timeout)
            )
        )

    async def result(self, task_id: str, *, timeout: float | None = None) -> "AsyncTask":
        """The task once it has completed. Raises `NotCompleted`, and `WaitTimedOut`."""
        task = await self.wait(task_id, timeout=timeout)
        if task.status != "completed":
            raise NotCompleted(task)
        return task

    def stream(self, task_id: str, *, after: int = -1) -> AsyncGenerator[Event, None]:
        """The events with a `seq` above `after` until the task ends. Reconnects as often as needed.

        No event is lost or doubled.
        """
        return self._transport.stream(
            event_steps.follow(requests.events_path(task_id), after, self._transport.policy)
        )

    async def cancel(self, task_id: str) -> "AsyncTask":
        """Cancel the task and return it. A task that has ended is unchanged."""
        return await self._task(requests.cancellation(task_id))

    async def list(
        self, *, limit: int | None = None, **filters: Unpack[TaskFilters]
    ) -> "AsyncGenerator[AsyncTaskSummary, None]":
        """The tasks of this API key, newest first, at most `limit` of them. Pages are read as needed."""
        cursor, left = None, limit
        while left is None or left > 0:
            page = await self._transport.read(requests.page(filters, cursor, left), _Tasks)
            for task in page.data:
                task._client = self
                yield task
            if not page.has_more or page.next is None:
                return
            cursor, left = page.next, None if left is None else left - len(page.data)

    async def delete(self, task_id: str) -> bool:
        """Erase a task that has ended, and return True. One that has not is cancelled instead: False."""
        response = await self._transport.run(calls.call(requests.deletion(task_id), self._transport.policy))
        return calls.is_empty(response)

    async def queue(self) -> Queue:
        """What waits and runs, of all tenants."""
        return await self._transport.read(requests.read(requests.QUEUE), Queue)

    async def workers(self) -> tuple[Worker, ...]:
        """The workers, as they report themselves."""
        return (await self._transport.read(requests.read(requests.WORKERS), Workers)).data

    async def models(self) -> tuple[Model, ...]:
        """The models that the service serves."""
        return (await self._transport.read(requests.read(requests.MODELS), Models)).data

    async def is_ready(self) -> bool:
        """Whether the service accepts tasks and can run them. Raises nothing."""
        try:
            await self._transport.run(calls.attempt(requests.read("/readyz")))
        except ClientError:
            return False
        return True

    async def _task(self, request: Request) -> "AsyncTask":
        return self._bind(await self._transport.run(calls.call(request, self._transport.policy)))

    def _bind(self, response: httpx.Response) -> "AsyncTask":
        task = calls.parse(response, AsyncTask)
        task._client = self
        return task


class AsyncTaskHandle(BaseModel):
    """What a task of an `AsyncClient` can do. Every method raises `ClientError`."""

    _client: AsyncClient = PrivateAttr()
    if TYPE_CHECKING:
        id: str

    async def refresh(self) -> "AsyncTask":
        """The task as it is now, with its outputs so far."""
        return await self._client.get(self.id)

    async def wait(self, *, timeout: float | None = None) -> "AsyncTask":
        """The task once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        return await self._client.wait(self.id, timeout=timeout)

    async def result(self, *, timeout: float | None = None) -> "AsyncTask":
        """The task once it has completed. Raises `NotCompleted`, and `WaitTimedOut`."""
        return await self._client.result(self.id, timeout=timeout)

    def stream(self, *, after: int = -1) -> AsyncGenerator[Event, None]:
        """Its events, as `AsyncClient.stream` yields them."""
        return self._client.stream(self.id, after=after)

    async def cancel(self) -> "AsyncTask":
        """Cancel the task. One that has ended is unchanged."""
        return await self._client.cancel(self.id)

    async def delete(self) -> bool:
        """Erase the task, and return True. One that has not ended is cancelled instead: False."""
        return await self._client.delete(self.id)


class AsyncTask(TaskFields, AsyncTaskHandle):
    """A task with its outputs so far. It does not change: `refresh` and `wait` return newer ones."""


class AsyncTaskSummary(TaskSummaryFields, AsyncTaskHandle):
    """A task of a list, without its outputs: `refresh` returns them."""


class _Tasks(Page[AsyncTaskSummary]):
    pass
