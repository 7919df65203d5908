"""`AsyncClient`: the HTTP API for asyncio, and the tasks that it returns."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx
from pydantic import BaseModel, PrivateAttr

from tokenmill.client import calls, event_steps, requests
from tokenmill.client.calls import Calls, Pause, Progress, Request, RetryPolicy, Send
from tokenmill.client.errors import ClientError, NotCompleted
from tokenmill.client.event_steps import Deliver, EventSteps, Receive
from tokenmill.client.parameters import TaskFilters, TaskParameters
from tokenmill.client.replies import Model, Models, Page, Reply, TaskFields, TaskSummaryFields
from tokenmill.protocol.messages import Event

_Reply = TypeVar("_Reply", bound=Reply)
_Result = TypeVar("_Result")


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
        self._address = requests.Address.resolve(base_url, api_key)
        self._timeout = timeout
        self._policy = RetryPolicy(max_retries=max_retries, patience=patience, clock=self._clock)
        self._owns_http = http_client is None
        self._http = http_client or httpx.AsyncClient(**self._address.http_options)

    @property
    def base_url(self) -> str:
        return self._address.base_url

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
        if self._owns_http:
            await self._http.aclose()

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
        return self._bind(await self._run(calls.wait(requests.task_path(task_id), self._policy, timeout)))

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
        return self._follow(event_steps.follow(requests.events_path(task_id), after, self._policy))

    async def cancel(self, task_id: str) -> "AsyncTask":
        """Cancel the task and return it. A task that has ended is unchanged."""
        return await self._task(requests.cancellation(task_id))

    async def list(
        self, *, limit: int | None = None, **filters: Unpack[TaskFilters]
    ) -> "AsyncGenerator[AsyncTaskSummary, None]":
        """The tasks of this API key, newest first, at most `limit` of them. Pages are read as needed."""
        cursor, left = None, limit
        while left is None or left > 0:
            page = await self._read(requests.page(filters, cursor, left), _Tasks)
            for task in page.data:
                task._client = self
                yield task
            if not page.has_more or page.next is None:
                return
            cursor, left = page.next, None if left is None else left - len(page.data)

    async def models(self) -> tuple[Model, ...]:
        """The models that the service serves."""
        return (await self._read(requests.read(requests.MODELS), Models)).data

    async def is_ready(self) -> bool:
        """Whether the service accepts tasks and can run them. Raises nothing."""
        try:
            await self._run(calls.attempt(requests.read("/readyz")))
        except ClientError:
            return False
        return True

    async def _task(self, request: Request) -> "AsyncTask":
        return self._bind(await self._run(calls.call(request, self._policy)))

    def _bind(self, response: httpx.Response) -> "AsyncTask":
        task = calls.parse(response, AsyncTask)
        task._client = self
        return task

    async def _read(self, request: Request, kind: type[_Reply]) -> _Reply:
        return calls.parse(await self._run(calls.call(request, self._policy)), kind)

    async def _run(self, steps: Calls[_Result]) -> _Result:
        """Perform the steps and return their result."""
        progress = Progress(steps)
        async with _Connection(self) as connection:
            while progress.step is not None:
                await connection.perform(progress)
        return progress.result

    async def _follow(self, steps: EventSteps) -> AsyncGenerator[Event, None]:
        """Perform the steps and yield what they deliver."""
        progress = Progress(steps)
        async with _Connection(self) as connection:
            while progress.step is not None:
                if isinstance(progress.step, Deliver):
                    for event in progress.step.events:
                        yield event
                    progress.done()
                else:
                    await connection.perform(progress)


class _Connection:
    """Performs steps. It has the one open stream."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def perform(self, progress: Progress[Any]) -> None:
        try:
            result = await self._perform(progress.step)
        except httpx.HTTPError as error:
            progress.failed(error)
        else:
            progress.done(result)

    async def _perform(self, step: Send | Pause | Receive) -> Any:
        match step:
            case Send():
                return await self._send(step)
            case Receive():
                return await anext(self._chunks, b"") if self._chunks else b""
            case Pause():
                await self._close()
                await self._client._sleep(step.seconds)
        return None

    async def _send(self, step: Send) -> httpx.Response:
        await self._close()
        client = self._client
        request = client._http.build_request(**client._address.arguments(step.request, client._timeout))
        response = await client._http.send(request, stream=step.stream)
        if step.stream:
            self._response = response
            if response.is_success:
                self._chunks = response.aiter_bytes()
            else:
                await response.aread()
        return response

    async def _close(self) -> None:
        self._chunks = None
        if self._response is not None:
            await self._response.aclose()
            self._response = None


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


class AsyncTask(TaskFields, AsyncTaskHandle):
    """A task with its outputs so far. It does not change: `refresh` and `wait` return newer ones."""


class AsyncTaskSummary(TaskSummaryFields, AsyncTaskHandle):
    """A task of a list, without its outputs: `refresh` returns them."""


class _Tasks(Page[AsyncTaskSummary]):
    pass
