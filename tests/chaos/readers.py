"""Three ways to read a task to its end (server-sent events, `TokenStream`, polls), and one that disconnects.

Messages are recorded as they arrive, in any order. A reader resumes where it was when its connection breaks.
"""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.chaos.calls import AWAY, Caller, RunOver
from tokenmill.client.sse import frames
from tokenmill.client.streams import TokenStream
from tokenmill.protocol.messages import FinishedEvent

TERMINAL = frozenset({"completed", "failed", "cancelled"})
POLL_WAIT_SECONDS = 1


@dataclass
class Reading:
    """What one reader received.

    `seqs`: of all messages, in the order of arrival. `polls`: the token ids of the first output in each poll.
    `statuses`: the final statuses that were reported.
    """

    seqs: list[int] = field(default_factory=list)
    polls: list[list[int]] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def last(self) -> int:
        return self.seqs[-1] if self.seqs else -1

    @property
    def num_received(self) -> int:
        return len(self.seqs) or len(self.polls[-1] if self.polls else ())


Progress = Callable[[int], None]
"""Receives the number of messages or tokens so far."""


def read_sse(caller: Caller, url: str, task_id: str, reading: Reading, progress: Progress) -> None:
    """Raises `RunOver`."""
    path = f"/v1/tasks/{task_id}/events"
    while not reading.ended:
        if caller.is_over:
            raise RunOver
        try:
            _read_one_stream(caller, path, reading, progress)
        except AWAY:
            caller.pause()


def _read_one_stream(caller: Caller, path: str, reading: Reading, progress: Progress) -> None:
    headers = {"Last-Event-ID": str(reading.last)} if reading.seqs else {}
    connection, response = caller.open_stream(path, headers)
    with closing(connection), response:
        if response.status == 204:
            # The stream has ended after the last message. The ledger checks whether that was the end.
            reading.ended = True
        elif response.status != 200:
            caller.refuse(response.status, response.headers, f"GET {path}")
        for frame in frames(response):
            reading.seqs.append(int(frame.id))
            reading.ended = frame.event == "finished"
            progress(reading.num_received)


def read_token_stream(caller: Caller, url: str, task_id: str, reading: Reading, progress: Progress) -> None:
    """Raises `RunOver`, and `UnknownTask` for a task that the service does not know any more."""
    while not reading.ended:
        try:
            for event in TokenStream(url, task_id, reading.last):
                reading.seqs.append(event.seq)
                reading.ended = isinstance(event, FinishedEvent) and event.done
                progress(reading.num_received)
                if caller.is_over:
                    raise RunOver
            # Also if there was nothing left to read.
            reading.ended = True
        except redis.RedisError:
            if caller.is_over:
                raise RunOver from None
            caller.pause()


def poll(caller: Caller, url: str, task_id: str, reading: Reading, progress: Progress) -> None:
    """Raises `RunOver`."""
    path = f"/v1/tasks/{task_id}"
    while not reading.ended:
        # Every third poll waits. Both kinds return a consistent snapshot.
        waits = f"?wait={POLL_WAIT_SECONDS}" if len(reading.polls) % 3 == 2 else ""
        _poll_once(caller, path + waits, task_id, reading)
        progress(reading.num_received)


def _poll_once(caller: Caller, path: str, task_id: str, reading: Reading) -> None:
    task = caller.call("GET", path).body
    reading.polls.append(token_ids(task))
    if task["status"] in TERMINAL:
        reading.statuses.append(task["status"])
        reading.ended = True
        if task["status"] == "completed" and task["usage"] is None:
            caller.complain(f"task {task_id} was reported as completed before it had a result")
    else:
        caller.pause()


def disconnect(caller: Caller, task_id: str, reading: Reading, disconnect_at: int) -> None:
    """Read some messages of a task with `on_disconnect=cancel`, disconnect, and poll until it ends.

    Raises `RunOver`. The messages are not recorded. A connection that breaks earlier counts as closed.
    """
    with suppress(*AWAY):
        _read_some(caller, f"/v1/tasks/{task_id}/events", disconnect_at)
    while not reading.ended:
        # Without `?wait`, which would count as a reader.
        _poll_once(caller, f"/v1/tasks/{task_id}", task_id, reading)


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
"""By the names in `workload.PERSISTENT_READERS`."""
