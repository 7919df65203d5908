"""Merging log and channel for one reader, call by call, with a scripted hub and log."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import pytest
import redis

from api.streams.pubsub_hub import Arrived
from api.streams.task_events import SILENCE_SECONDS, TaskEventReader
from tokenmill.protocol.messages import LogEntry, Usage, decode, encode

END = LogEntry.of_end("", "stop", usage=Usage(prompt_tokens=1, completion_tokens=2))


def message(seq: Any, entry: Any = None) -> Any:
    return encode((entry or LogEntry.of_token(seq, str(seq))).to_event("t", seq)).encode()


class Scripted:
    """A hub, a log and a clock. `turns`: the result of each wait; each takes a second."""

    def __init__(
        self, *turns: Any, log: Any = (), known: Any = True, finished_at: Any = None, failures: Any = 0
    ) -> None:
        self.turns = list(turns)
        self.log = list(log)
        self.known = known
        self.finished_at = finished_at
        self.failures = failures
        self.now = 100.0
        self.reads: list[int] = []

    @contextmanager
    def subscribe(self, channel: Any) -> Iterator[Any]:
        assert channel == "tokenmill:tok:t"
        yield self

    def wait(self, seconds: float) -> Any:
        self.now += min(1.0, seconds)
        return self.turns.pop(0) if self.turns else Arrived(False, [])

    def read_log(self, task_id: str, after: int, count: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise redis.ConnectionError("away")
        self.reads.append(after)
        return [event for event in map(decode, self.log) if event.seq > after][:count]

    def inspect(self, task_id: str) -> Any:
        return self if self.known else None

    def follow(self, after: int = -1, turns: Any = 30, **options: Any) -> Any:
        reader = reader_of(self)
        batches = reader.batches("t", after, stop=options.pop("stop", lambda: False), **options)
        return [[event.seq for event in batch] for batch in islice(batches, turns)]


def reader_of(script: Scripted) -> TaskEventReader:
    return TaskEventReader(cast(Any, script), cast(Any, script), clock=lambda: script.now)


def test_the_log_comes_first_then_the_channel() -> None:
    script = Scripted(
        Arrived(True, [message(1), message(2)]),
        Arrived(False, [message(3), message(4, END)]),
        log=[message(0), message(1)],
    )
    assert script.follow() == [[0, 1, 2], [3, 4]]
    assert script.reads == [-1]


def test_an_end_between_reading_the_log_and_asking_for_the_state_is_returned() -> None:
    class EndsMeanwhile(Scripted):
        def inspect(self, task_id: str) -> Any:
            self.log, self.finished_at = [message(0), message(1, END)], 1.0
            return self

    assert EndsMeanwhile(Arrived(True, [])).follow() == [[0, 1]]


def test_a_gap_is_filled_from_the_log() -> None:
    script = Scripted(
        Arrived(True, []),
        Arrived(False, [message(2), message(3, END)]),
        log=[message(0), message(1), message(2)],
    )
    script.log = [message(0)]
    batches = reader_of(script).batches("t", -1, stop=lambda: False)
    assert [event.seq for event in next(batches)] == [0]
    script.log = [message(0), message(1), message(2)]
    assert [event.seq for event in next(batches)] == [1, 2, 3]


def test_no_event_is_repeated() -> None:
    script = Scripted(
        Arrived(True, [message(0)]),
        Arrived(True, [message(0), message(1)]),
        Arrived(False, [message(2, END)]),
        log=[message(0), message(1)],
    )
    assert script.follow() == [[0, 1], [], [2]]


def test_a_lost_message_is_found_after_the_silence() -> None:
    script = Scripted(Arrived(True, []), log=[message(0)])
    batches = reader_of(script).batches("t", -1, stop=lambda: False)
    assert [event.seq for event in next(batches)] == [0]
    script.log.append(message(1, END))
    assert [len(batch) for batch in batches] == [0] * (int(SILENCE_SECONDS) - 1) + [1]


def test_a_deleted_task_ends_the_stream() -> None:
    """Deleted by other tools or expired: no message announces that."""
    script = Scripted(Arrived(True, []))
    batches = reader_of(script).batches("t", -1, stop=lambda: False)
    assert next(batches) == []
    script.known = False
    assert len(list(batches)) == SILENCE_SECONDS - 1


def test_a_reader_that_starts_after_the_end_ends() -> None:
    script = Scripted(Arrived(True, []), Arrived(False, [message(1, END)]), log=[message(0)])
    assert script.follow(after=7) == [[], []]
    # The end came before the subscription.
    script = Scripted(Arrived(True, []), log=[message(0), message(1, END)], finished_at=99.0)
    assert script.follow(after=7) == [[]]


def test_a_silent_task_keeps_its_stream() -> None:
    assert len(Scripted(Arrived(True, [])).follow(turns=100)) == 100


def test_an_outage_of_redis_loses_no_event() -> None:
    script = Scripted(
        Arrived(True, [message(1)]), Arrived(False, [message(2)]), Arrived(False, [message(3, END)]),
        log=[message(0), message(1), message(2)], failures=2,
    )  # fmt: skip
    assert script.follow() == [[], [], [0, 1, 2, 3]]


@pytest.mark.parametrize("seconds", [0, 0.5, 3])
def test_a_time_limit_ends_the_stream(seconds: float) -> None:
    script = Scripted(Arrived(True, []))
    script.follow(seconds=seconds)
    assert script.now == 100 + seconds


def test_stop_ends_the_stream() -> None:
    answers = iter([False, False, True])
    assert Scripted(Arrived(True, [])).follow(stop=lambda: next(answers)) == [[], []]
