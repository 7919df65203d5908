"""Performs the steps of calls with an `httpx.AsyncClient`."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import httpx

from tokenmill.client import calls
from tokenmill.client.address import Address
from tokenmill.client.calls import Calls, RetryPolicy
from tokenmill.client.replies import Reply
from tokenmill.client.steps import Deliver, Pause, Progress, Receive, Request, Send, StreamSteps

_Reply = TypeVar("_Reply", bound=Reply)
_Result = TypeVar("_Result")


class AsyncTransport:
    """Sends the calls of a client to `address`. `timeout`: seconds for each reply.

    `http`: an httpx client of the caller's, which stays open; None: one of its own.
    """

    # More parameters than usual: the settings of a client.
    def __init__(
        self,
        address: Address,
        policy: RetryPolicy,
        *,
        timeout: float,
        sleep: Callable[[float], Awaitable[None]],
        http: httpx.AsyncClient | None,
    ) -> None:
        self.address = address
        self.policy = policy
        self.timeout = timeout
        self.sleep = sleep
        self.http = http or httpx.AsyncClient(**address.http_options)
        self._is_own = http is None

    async def close(self) -> None:
        """Close the connections."""
        if self._is_own:
            await self.http.aclose()

    async def read(self, request: Request, kind: type[_Reply]) -> _Reply:
        """The reply to a call. Raises `ClientError`."""
        return calls.parse(await self.run(calls.call(request, self.policy)), kind)

    async def run(self, steps: Calls[_Result]) -> _Result:
        """Perform the steps and return their result. Raises `ClientError`."""
        progress = Progress(steps)
        async with _Connection(self) as connection:
            while progress.step is not None:
                await connection.perform(progress)
        return progress.result

    async def stream(self, steps: StreamSteps) -> AsyncGenerator[Any, None]:
        """Perform the steps and yield what they deliver. Raises `ClientError`."""
        progress = Progress(steps)
        async with _Connection(self) as connection:
            while progress.step is not None:
                if isinstance(progress.step, Deliver):
                    for item in progress.step.items:
                        yield item
                    progress.done()
                else:
                    await connection.perform(progress)


class _Connection:
    """Performs steps. It has the one open stream."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
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
                await self._transport.sleep(step.seconds)
        return None

    async def _send(self, step: Send) -> httpx.Response:
        await self._close()
        transport = self._transport
        with ExitStack() as stack:
            arguments = transport.address.arguments(step.request, transport.timeout, stack)
            request = transport.http.build_request(**arguments)
            response = await transport.http.send(request, stream=step.stream)
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
