"""`Client`: the HTTP API for programs with threads, and the tasks that it returns."""

import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import httpx
from pydantic import BaseModel, PrivateAttr

from tokenmill.client import calls, event_steps, requests
from tokenmill.client.address import Address
from tokenmill.client.batches.sync_batches import Batches, Files
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
from tokenmill.client.sync_transport import SyncTransport
from tokenmill.protocol.messages import Event


class Client:
    """Calls the service at `base_url` with `api_key`. Thread-safe. Close it, or use it in a `with` statement.

    Unset arguments come from TOKENMILL_URL and TOKENMILL_API_KEY. `timeout`: seconds for each reply, beyond
    the time that the call asks the service to wait. `max_retries`: further attempts of one call after an
    outage or a full queue. `patience`: seconds for which `wait` and `stream` bridge an outage. `http_client`:
    an httpx client to use, for TLS, proxies and the like; it is not closed.

    Every method raises `ClientError`.
    """

    _sleep: Callable[[float], None] = staticmethod(time.sleep)
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
        http_client: httpx.Client | None = None,
    ) -> None:
        """Raises ValueError for an address or a key that cannot be used."""
        address = Address.resolve(base_url, api_key)
        policy = RetryPolicy(max_retries=max_retries, patience=patience, clock=self._clock)
        self._transport = SyncTransport(address, policy, timeout=timeout, sleep=self._sleep, http=http_client)
        self.files = Files(self._transport)
        self.batches = Batches(self._transport, self.files)

    @property
    def base_url(self) -> str:
        return self._transport.address.base_url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def submit(
        self,
        prompt: str | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[TaskParameters],
    ) -> "Task":
        """Submit a task: text to continue, or `messages` or `prompt_token_ids` instead.

        The idempotency key, by default a new one, makes retries return the task of the first attempt.
        """
        return self._task(requests.submission(prompt, idempotency_key, fields))

    def get(self, task_id: str, *, wait: float = 0.0, include_prompt: bool = False) -> "Task":
        """The task now; with `wait`, once it has ended or after that many seconds, at most 60."""
        return self._task(requests.one_task(task_id, wait, include_prompt=include_prompt))

    def wait(self, task_id: str, *, timeout: float | None = None) -> "Task":
        """The task once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        return self._bind(
            self._transport.run(calls.wait(requests.task_path(task_id), self._transport.policy, timeout))
        )

    def result(self, task_id: str, *, timeout: float | None = None) -> "Task":
        """The task once it has completed. Raises `NotCompleted`, and `WaitTimedOut`."""
        task = self.wait(task_id, timeout=timeout)
        if task.status != "completed":
            raise NotCompleted(task)
        return task

    def stream(self, task_id: str, *, after: int = -1) -> Generator[Event, None, None]:
        """The events with a `seq` above `after` until the task ends. Reconnects as often as needed.

        No event is lost or doubled. To leave early, `close()` the generator; the task continues.
        """
        return self._transport.stream(
            event_steps.follow(requests.events_path(task_id), after, self._transport.policy)
        )

    def cancel(self, task_id: str) -> "Task":
        """Cancel the task and return it. A task that has ended is unchanged."""
        return self._task(requests.cancellation(task_id))

    def list(
        self, *, limit: int | None = None, **filters: Unpack[TaskFilters]
    ) -> "Generator[TaskSummary, None, None]":
        """The tasks of this API key, newest first, at most `limit` of them. Pages are read as needed."""
        cursor, left = None, limit
        while left is None or left > 0:
            page = self._transport.read(requests.page(filters, cursor, left), _Tasks)
            for task in page.data:
                task._client = self
                yield task
            if not page.has_more or page.next is None:
                return
            cursor, left = page.next, None if left is None else left - len(page.data)

    def delete(self, task_id: str) -> bool:
        """Erase a task that has ended, and return True. One that has not is cancelled instead: False."""
        response = self._transport.run(calls.call(requests.deletion(task_id), self._transport.policy))
        return calls.is_empty(response)

    def queue(self) -> Queue:
        """What waits and runs, of all tenants."""
        return self._transport.read(requests.read(requests.QUEUE), Queue)

    def workers(self) -> tuple[Worker, ...]:
        """The workers, as they report themselves."""
        return (self._transport.read(requests.read(requests.WORKERS), Workers)).data

    def models(self) -> tuple[Model, ...]:
        """The models that the service serves."""
        return self._transport.read(requests.read(requests.MODELS), Models).data

    def is_ready(self) -> bool:
        """Whether the service accepts tasks and can run them. Raises nothing."""
        try:
            self._transport.run(calls.attempt(requests.read("/readyz")))
        except ClientError:
            return False
        return True

    def _task(self, request: Request) -> "Task":
        return self._bind(self._transport.run(calls.call(request, self._transport.policy)))

    def _bind(self, response: httpx.Response) -> "Task":
        task = calls.parse(response, Task)
        task._client = self
        return task


class TaskHandle(BaseModel):
    """What a task of a `Client` can do. Every method raises `ClientError`."""

    _client: Client = PrivateAttr()
    if TYPE_CHECKING:
        id: str

    def refresh(self) -> "Task":
        """The task as it is now, with its outputs so far."""
        return self._client.get(self.id)

    def wait(self, *, timeout: float | None = None) -> "Task":
        """The task once it has ended. Raises `WaitTimedOut` after `timeout` seconds."""
        return self._client.wait(self.id, timeout=timeout)

    def result(self, *, timeout: float | None = None) -> "Task":
        """The task once it has completed. Raises `NotCompleted`, and `WaitTimedOut`."""
        return self._client.result(self.id, timeout=timeout)

    def stream(self, *, after: int = -1) -> Generator[Event, None, None]:
        """Its events, as `Client.stream` yields them."""
        return self._client.stream(self.id, after=after)

    def cancel(self) -> "Task":
        """Cancel the task. One that has ended is unchanged."""
        return self._client.cancel(self.id)

    def delete(self) -> bool:
        """Erase the task, and return True. One that has not ended is cancelled instead: False."""
        return self._client.delete(self.id)


class Task(TaskFields, TaskHandle):
    """A task with its outputs so far. It does not change: `refresh` and `wait` return newer ones."""


class TaskSummary(TaskSummaryFields, TaskHandle):
    """A task of a list, without its outputs: `refresh` returns them."""


class _Tasks(Page[TaskSummary]):
    pass
