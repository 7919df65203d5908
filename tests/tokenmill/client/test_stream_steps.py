"""The steps of following a task, without Redis: what is read, awaited, delivered and retried."""

import logging
from typing import Any

import pytest
import redis

from tokenmill.client.stream_steps import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    Deliver,
    ReadLog,
    Retry,
    Step,
    StreamSteps,
    Subscribe,
    UnknownTask,
    WaitForMessage,
)
from tokenmill.protocol import keys, log
from tokenmill.protocol.messages import LogEntry, ProtocolError, encode

SILENCE_SECONDS = 15.0


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steps(clock: Clock) -> StreamSteps:
    return StreamSteps("t", -1, SILENCE_SECONDS, clock)


def rows(first: int, last: int) -> list[log.Row]:
    """The rows of tokens `first` to `last`."""
    return [(f"0-{seq + 1}".encode(), {b"t": b"5", b"x": b'"x"'}) for seq in range(first, last + 1)]


def message(seq: int, entry: LogEntry | None = None) -> dict[str, Any]:
    event = (entry or LogEntry.of_token(5, "x")).to_event("t", seq)
    return {"type": "message", "data": encode(event).encode()}


def seqs(step: Step | None) -> list[int]:
    assert isinstance(step, Deliver)
    return [event.seq for event in step.events]


def listening(steps: StreamSteps, num_tokens: int = 0) -> Step | None:
    """The first wait for a message, after a log of `num_tokens` and the confirmed subscription."""
    assert isinstance(steps.first(), ReadLog)
    step = steps.done([rows(0, num_tokens - 1), 1, 0])
    if num_tokens:
        assert seqs(step) == list(range(num_tokens))
        step = steps.done()
    assert step == Subscribe(keys.channel("t"))
    assert isinstance(steps.done(), WaitForMessage)
    assert steps.done({"type": "subscribe"}) == ReadLog("t", num_tokens - 1)
    return steps.done([[], 1, 0])


def test_live_events_are_delivered_until_the_end(steps: StreamSteps) -> None:
    assert isinstance(listening(steps), WaitForMessage)
    assert seqs(steps.done(message(0))) == [0]
    assert isinstance(steps.done(), WaitForMessage)
    assert seqs(steps.done(message(1, LogEntry.of_end("", "stop")))) == [1]
    assert steps.done() is None


def test_an_event_of_a_newer_version_is_skipped(steps: StreamSteps) -> None:
    """Its `seq` counts: it is no gap."""
    newer = {"type": "message", "data": b'{"v":1,"id":"t","seq":3,"weather":"sunny"}'}
    steps.first()
    assert seqs(steps.done([[*rows(0, 0), (b"0-2", {b"w": b"sunny"}), *rows(2, 2)], 1, 0])) == [0, 2]
    assert isinstance(steps.done(), Subscribe)
    steps.done()
    assert steps.done({"type": "subscribe"}) == ReadLog("t", 2)
    steps.done([[], 1, 0])
    assert isinstance(steps.done(newer), WaitForMessage)
    assert seqs(steps.done(message(4))) == [4]


def test_another_version_of_the_protocol_is_an_error(steps: StreamSteps) -> None:
    listening(steps)
    with pytest.raises(ProtocolError, match="version 2 of the protocol, where 1 is expected"):
        steps.done({"type": "message", "data": b'{"v":2,"id":"t","seq":0,"token":5,"text":"x","index":0}'})


def test_a_gap_is_filled_from_the_log(steps: StreamSteps) -> None:
    listening(steps, 1)
    assert steps.done(message(3)) == ReadLog("t", 0)
    assert seqs(steps.done([rows(1, 3), 1, 0])) == [1, 2, 3]
    assert isinstance(steps.done(), WaitForMessage)


def test_events_that_were_delivered_are_dropped(steps: StreamSteps) -> None:
    listening(steps, 3)
    assert isinstance(steps.done(message(1)), WaitForMessage)
    assert seqs(steps.done(message(3))) == [3]


def test_after_a_silence_the_log_is_read(steps: StreamSteps, clock: Clock) -> None:
    listening(steps, 1)
    assert isinstance(steps.done(None), WaitForMessage), "no silence yet"
    clock.now += SILENCE_SECONDS
    assert steps.done(None) == ReadLog("t", 0)
    assert isinstance(steps.done([[], 1, 0]), WaitForMessage), "nothing was missed"
    clock.now += SILENCE_SECONDS
    assert steps.done(None) == ReadLog("t", 0)
    assert seqs(steps.done([rows(1, 1), 1, 0])) == [1]
    assert isinstance(steps.done(), Subscribe), "the channel did not deliver"


def test_a_long_log_is_delivered_page_by_page(steps: StreamSteps) -> None:
    steps.first()
    page = log.PAGE
    assert len(seqs(steps.done([rows(0, page - 1), 1, 1]))) == page
    assert steps.done() == ReadLog("t", page - 1)
    assert seqs(steps.done([rows(page, page), 1, 1])) == [page]
    assert steps.done() is None, "the task has ended"


def test_retries_slow_down_until_events_arrive(steps: StreamSteps, caplog: pytest.LogCaptureFixture) -> None:
    listening(steps)
    caplog.set_level(logging.WARNING)
    delays = []
    for _ in range(8):
        step = steps.failed(redis.ConnectionError("gone"))
        assert isinstance(step, Retry)
        delays.append(step.seconds)
        assert isinstance(steps.done(), Subscribe)
    assert delays[:3] == [FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS]
    assert delays[-1] == LAST_RETRY_SECONDS
    assert len(caplog.records) == 1
    assert "t: waiting for Redis to continue after event -1: gone" in caplog.text

    steps.done()
    steps.done({"type": "subscribe"})
    assert seqs(steps.done([rows(0, 0), 1, 0])) == [0]
    steps.done()
    assert steps.failed(redis.TimeoutError()) == Retry(FIRST_RETRY_SECONDS)
    assert len(caplog.records) == 2, "another outage"


@pytest.mark.parametrize("error", [redis.TimeoutError("late"), redis.ConnectionError("refused")])
def test_an_error_at_the_start_is_a_connection_error(steps: StreamSteps, error: Exception) -> None:
    steps.first()
    with pytest.raises(redis.ConnectionError, match=str(error)):
        steps.failed(error)


def test_wrong_credentials_are_not_retried(steps: StreamSteps) -> None:
    listening(steps)
    with pytest.raises(redis.AuthenticationError):
        steps.failed(redis.AuthenticationError())


def test_a_task_without_keys_is_unknown(steps: StreamSteps) -> None:
    steps.first()
    with pytest.raises(UnknownTask):
        steps.done([[], 0, 0])
