"""Three ways to read a task to its end: server-sent events, `TokenStream`, polls; and one that goes away.

Law: what was received is written down as it came, good or bad; nothing is put in order here. Each goes on
from where it was when its connection breaks, as its users would.
"""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.chaos.calls import AWAY, Caller, GaveUp
from tokenmill.client.sse import frames
from tokenmill.client.streams import TokenStream
from tokenmill.protocol.messages import FinishedEvent

TERMINAL = frozenset({"completed", "failed", "cancelled"})
POLL_WAIT_SECONDS = 1


@dataclass
class Reading:
    """What one reader got. `seqs`: of all messages, in the order of their coming. `glimpses`: the token ids
    of the first output, of each poll. `told`: each status that was given as the end.
    """

    seqs: list[int] = field(default_factory=list)
    glimpses: list[list[int]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def last(self) -> int:
        return self.seqs[-1] if self.seqs else -1

    @property
    def num_received(self) -> int:
        return len(self.seqs) or len(self.glimpses[-1] if self.glimpses else ())


Progress = Callable[[int], None]
"""Told how many messages or tokens have come."""


def read_sse(caller: Caller, url: str, task_id: str, reading: Reading, progress: Progress) -> None:
    """Raises `GaveUp`."""
    path = f"/v1/tasks/{task_id}/events"
    while not reading.ended:
        if caller.is_over:
            raise GaveUp
        try:
            _read_one_stream(caller, path, reading, progress)
        except AWAY:
            caller.pause()


def _read_one_stream(caller: Caller, path: str, reading: Reading, progress: Progress) -> None:
    headers = {"Last-Event-ID": str(reading.last)} if reading.seqs else {}
    connection, response = caller.open_stream(path, headers)
    with closing(connection), response:
        if response.status == 204:
            # Ended, and nothing is behind the last one: whether that was the end is for the ledger.
            reading.ended = True
        elif response.status != 200:
            caller.refuse(response.status, response.headers, f"GET {path}")
        for frame in frames(response):
            reading.seqs.append(int(frame.id))
            reading.ended = frame.event == "finished"
            progress(reading.num_received)


def read_token_stream(caller: Caller, url: str, task_id: str, reading: Reading, progress: Progress) -> None:
    """Raises `GaveUp`, and `UnknownTask` of a task that the service has forgotten."""
    while not reading.ended:
        try:
            for event in TokenStream(url, task_id, reading.last):
                reading.seqs.append(event.seq)
                reading.ended = isinstance(event, FinishedEvent) and event.done
                progress(reading.num_received)
                if caller.is_over:
                    raise GaveUp
            # Also where nothing was left to read behind the last one.
            reading.ended = True
        except redis.RedisError:
            if caller.is_over:
                raise GaveUp from None
            caller.pause()


def poll(caller: Caller, url: str, task_id: str, reading: Reading, progress: Progress) -> None:
    """Raises `GaveUp`."""
    path = f"/v1/tasks/{task_id}"
    while not reading.ended:
        # Some look, some wait: both see the task as it is at one moment.
        waits = f"?wait={POLL_WAIT_SECONDS}" if len(reading.glimpses) % 3 == 2 else ""
        _glimpse(caller, path + waits, task_id, reading)
        progress(reading.num_received)


def _glimpse(caller: Caller, path: str, task_id: str, reading: Reading) -> None:
    task = caller.call("GET", path).body
    reading.glimpses.append(token_ids(task))
    if task["status"] in TERMINAL:
        reading.told.append(task["status"])
        reading.ended = True
        if task["status"] == "completed" and task["usage"] is None:
            caller.complain(f"task {task_id} was shown as completed before its result")
    else:
        caller.pause()


def leave(caller: Caller, task_id: str, reading: Reading, leave_at: int) -> None:
    """Read some messages of a task that is to end with its readers, close the connection, and look from afar.

    Raises `GaveUp`. What was read is not kept: the end alone is looked at. A connection that breaks before
    is as good as closed.
    """
    with suppress(*AWAY):
        _read_some(caller, f"/v1/tasks/{task_id}/events", leave_at)
    while not reading.ended:
        # Without `?wait`, which would be a reader.
        _glimpse(caller, f"/v1/tasks/{task_id}", task_id, reading)


def _read_some(caller: Caller, path: str, number: int) -> None:
    connection, response = caller.open_stream(path, {})
    with closing(connection), response:
        if response.status not in (200, 204):
            caller.refuse(response.status, response.headers, f"GET {path}")
        for place, _ in enumerate(frames(response), 1):
            if place > number or caller.is_over:
                return


def token_ids(task: Any) -> list[int]:
    return list(task["outputs"][0]["token_ids"]) if task["outputs"] else []


READ = {"sse": read_sse, "token_stream": read_token_stream, "poll": poll}
"""By the names of `errands.STAYING`."""
