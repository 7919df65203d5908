"""Whatever happens to the connections, each event and each line is delivered once and in order.

The steps are performed here without I/O: connections are refused, fail, end early, or are cut at any byte.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenmill.cli.fake_service import finished, token
from tokenmill.client.batches.steps import read_lines
from tokenmill.client.calls import RetryPolicy
from tokenmill.client.event_steps import follow
from tokenmill.client.steps import Deliver, Progress, Receive, Send

POLICY = RetryPolicy(max_retries=0, patience=1000.0, clock=lambda: 0.0)
NUM_EVENTS = 6
TEXTS = ["a", "\u20ac\n", "\u2028", "data: x", "", "z"]


@dataclass(frozen=True)
class Connection:
    """One attempt: `status`, or 0 for a refused one. Its body is cut after `length` bytes, in an orderly way
    or by an error.
    """

    status: int
    length: int
    chunk: int
    fails: bool


connections = st.lists(
    st.builds(
        Connection,
        status=st.sampled_from([0, 200, 200, 200, 429, 503]),
        length=st.integers(0, 900),
        chunk=st.integers(1, 300),
        fails=st.booleans(),
    ),
    max_size=12,
)


class Network:
    """Performs steps. After the connections of `script` every one lasts."""

    def __init__(self, body_of: Callable[[Send], bytes], script: list[Connection]) -> None:
        self._body_of = body_of
        self._script = list(script)
        self._chunks: list[bytes] = []
        self._fails = False

    def deliver(self, steps: Generator[Any, Any, None]) -> list[Any]:
        """What the steps deliver."""
        progress = Progress(steps)
        delivered: list[Any] = []
        while (step := progress.step) is not None:
            if isinstance(step, Deliver):
                delivered += step.items
            try:
                result = self._perform(step)
            except httpx.HTTPError as error:
                progress.failed(error)
            else:
                progress.done(result)
        return delivered

    def _perform(self, step: Any) -> Any:
        if isinstance(step, Send):
            return self._connect(step)
        if isinstance(step, Receive):
            if not self._chunks and self._fails:
                raise httpx.ReadError("cut")
            return self._chunks.pop(0) if self._chunks else b""
        return None

    def _connect(self, step: Send) -> httpx.Response:
        now = self._script.pop(0) if self._script else Connection(200, 10**6, 50, False)
        request = httpx.Request("GET", "http://service" + step.request.path)
        if not now.status:
            raise httpx.ConnectError("refused", request=request)
        body = self._body_of(step)[: now.length]
        self._chunks = [body[start : start + now.chunk] for start in range(0, len(body), now.chunk)]
        self._fails = now.fails
        return httpx.Response(now.status, request=request)


def frame(seq: int) -> str:
    return finished(seq) if seq == NUM_EVENTS - 1 else token(seq, TEXTS[seq])


@given(connections, st.integers(-1, NUM_EVENTS - 2))
def test_each_event_is_delivered_once(script: list[Connection], after: int) -> None:
    def body_of(step: Send) -> bytes:
        last = int(step.request.headers.get("Last-Event-ID", -1))
        return (": hello\n\n" + "".join(map(frame, range(last + 1, NUM_EVENTS)))).encode()

    events = Network(body_of, script).deliver(follow("/events", after, POLICY))

    assert [event.seq for event in events] == list(range(after + 1, NUM_EVENTS))
    assert [event.text for event in events[:-1]] == TEXTS[after + 1 : -1]


@given(connections, st.booleans())
def test_each_line_of_a_file_is_delivered_once(script: list[Connection], ends_with_line_feed: bool) -> None:
    lines = [f"{number} {'x' * (number * 7)}".encode() for number in range(20)]
    body = b"\n".join(lines) + b"\n" * ends_with_line_feed

    # A body without its announced end is an error in HTTP, unlike the end of an event stream.
    script = [replace(each, fails=each.fails or each.length < len(body)) for each in script]

    assert Network(lambda _: body, script).deliver(read_lines("file-1", POLICY)) == lines
