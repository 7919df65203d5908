"""Performs the steps of calls with an `httpx.Client`."""

from collections.abc import Callable, Generator, Iterator
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


class SyncTransport:
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
        sleep: Callable[[float], None],
        http: httpx.Client | None,
    ) -> None:
        self.address = address
        self.policy = policy
        self.timeout = timeout
        self.sleep = sleep
        self.http = http or httpx.Client(**address.http_options)
        self._is_own = http is None

    def close(self) -> None:
        """Close the connections."""
        if self._is_own:
            self.http.close()

    def read(self, request: Request, kind: type[_Reply]) -> _Reply:
        """The reply to a call. Raises `ClientError`."""
        return calls.parse(self.run(calls.call(request, self.policy)), kind)

    def run(self, steps: Calls[_Result]) -> _Result:
        """Perform the steps and return their result. Raises `ClientError`."""
        progress = Progress(steps)
        with _Connection(self) as connection:
            while progress.step is not None:
                connection.perform(progress)
        return progress.result

    def stream(self, steps: StreamSteps) -> Generator[Any, None, None]:
        """Perform the steps and yield what they deliver. Raises `ClientError`."""
        progress = Progress(steps)
        with _Connection(self) as connection:
            while progress.step is not None:
                if isinstance(progress.step, Deliver):
                    yield from progress.step.items
                    progress.done()
                else:
                    connection.perform(progress)


class _Connection:
    """Performs steps. It has the one open stream."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport
        self._response: httpx.Response | None = None
        self._chunks: Iterator[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def perform(self, progress: Progress[Any]) -> None:
        try:
            result = self._perform(progress.step)
        except httpx.HTTPError as error:
            progress.failed(error)
        else:
            progress.done(result)

    def _perform(self, step: Send | Pause | Receive) -> Any:
        match step:
            case Send():
                return self._send(step)
            case Receive():
                return next(self._chunks, b"") if self._chunks else b""
            case Pause():
                self._close()
                self._transport.sleep(step.seconds)
        return None

    def _send(self, step: Send) -> httpx.Response:
        self._close()
        transport = self._transport
        with ExitStack() as stack:
            arguments = transport.address.arguments(step.request, transport.timeout, stack)
            request = transport.http.build_request(**arguments)
            response = transport.http.send(request, stream=step.stream)
        if step.stream:
            self._response = response
            if response.is_success:
                self._chunks = response.iter_bytes()
            else:
                response.read()
        return response

    def _close(self) -> None:
        self._chunks = None
        if self._response is not None:
            self._response.close()
            self._response = None
