"""How to wait for a batch and to read its files, as steps for a transport to perform. No I/O here.

Invariant: each line of a file is delivered once and in order, whatever happens to the connection.
"""

from typing import Any

import httpx

from tokenmill.client.batches import requests
from tokenmill.client.batches.replies import ENDED
from tokenmill.client.calls import Backoff, Calls, RetryPolicy, Status, WaitLimit, attempt, call, parse
from tokenmill.client.errors import Broken, ClientError
from tokenmill.client.steps import Deliver, Pause, Receive, Request, StreamSteps

FIRST_POLL_SECONDS = 0.5
LAST_POLL_SECONDS = 10.0
READ_SECONDS = 60.0


def wait(batch_id: str, policy: RetryPolicy, timeout: float | None) -> Calls[Any]:
    """The `httpx.Response` with the ended batch. `timeout`: seconds. Raises `ClientError`."""
    limit = WaitLimit("batch", timeout, policy.clock)
    pause = FIRST_POLL_SECONDS
    while True:
        request = Request(method="GET", path=requests.batch_path(batch_id))
        response = yield from call(request, policy, patient=True)
        if parse(response, Status).status in ENDED:
            return response
        limit.check(request)
        yield Pause(limit.reduce(pause))
        pause = min(2 * pause, LAST_POLL_SECONDS)


def read_lines(file_id: str, policy: RetryPolicy) -> StreamSteps:
    """Deliver the lines of a file, as bytes. Raises `ClientError`."""
    lines = _Lines()
    backoff = Backoff(policy, patient=True)
    while True:
        before = lines.num_taken
        try:
            yield from _read(f"{requests.file_path(file_id)}/content", lines)
        except ClientError as error:
            if lines.num_taken > before:
                backoff.reset()
            pause = backoff.pause(error)
        else:
            return
        yield pause


def _read(path: str, lines: "_Lines") -> StreamSteps:
    """Deliver the new lines of one reply. Raises `ClientError` if it is cut short."""
    lines.restart()
    yield from attempt(Request(method="GET", path=path, timeout=READ_SECONDS), stream=True)
    try:
        while data := (yield Receive()):
            if new := lines.feed(data):
                yield Deliver(new)
    except httpx.HTTPError as error:
        raise Broken(f"the file was cut short: {error}") from error
    if new := lines.end():
        yield Deliver(new)


class _Lines:
    """The lines of a file that is read from its start again after each failure. `num_taken`: those so far."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.restart()

    def restart(self) -> None:
        self._rest = b""
        self._position = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The new lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return self._take(lines)

    def end(self) -> list[bytes]:
        """The last line, if it has no line feed."""
        return self._take([self._rest] if self._rest else [])

    def _take(self, lines: list[bytes]) -> list[bytes]:
        new = lines[max(0, self.num_taken - self._position) :]
        self._position += len(lines)
        self.num_taken = max(self.num_taken, self._position)
        return new
