"""Defines the messages between the harness and an engine's process: one line of JSON in each direction.

An engine's process answers each line with exactly one line, and ends with the harness. Answers use a
descriptor of their own, because libraries print to stdout. Standard library only, as every engine's
environment imports this.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TextIO

PR_SET_PDEATHSIG = 1


class Settings(NamedTuple):
    """The same for all engines. `token_budget`: tokens of one step. `kv_tokens`: that the KV cache holds,
    which are `kv_bytes`.

    `options`: what makes one engine's modes differ, such as `{"eager": True}`.
    """

    model: str
    dtype: str
    threads: int
    token_budget: int
    max_seqs: int
    max_model_len: int
    kv_tokens: int
    kv_bytes: int
    scratch: str
    options: dict[str, Any]
    device: str = "cpu"


class Request(NamedTuple):
    """`arrival`: seconds after the beginning of the run; nobody may look at the prompt before."""

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0


class Served(NamedTuple):
    """One request's tokens, and the seconds after the beginning of the run when each was there."""

    tokens: list[int]
    times: list[float]


class Peer(Protocol):
    """One engine. Greedy decoding, the model's own ends ignored, exactly `max_tokens` tokens each."""

    def load(self, settings: Settings) -> dict[str, Any]:
        """Make ready; returns versions and settings worth telling."""

    def run(self, requests: list[Request]) -> list[Served]:
        """Serve them in their order of arrival; the results in the order given."""


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begun

    def at(self, moment: float) -> float:
        """Of a moment that `time.perf_counter` gave."""
        return moment - self._begun

    def wait_until(self, moment: float) -> None:
        if (left := moment - self.now()) > 0:
            time.sleep(left)


class Arrivals:
    """Gives out requests when their time has come, with their places."""

    def __init__(self, requests: list[Request], clock: Clock) -> None:
        self._coming = sorted(enumerate(requests), key=lambda one: one[1].arrival, reverse=True)
        self._clock = clock

    @property
    def are_over(self) -> bool:
        return not self._coming

    def due(self) -> list[tuple[int, Request]]:
        """Those who have come since the last call."""
        due: list[tuple[int, Request]] = []
        now = self._clock.now()
        while self._coming and self._coming[-1][1].arrival <= now:
            due.append(self._coming.pop())
        return due

    def wait(self) -> None:
        """Sleep until the next one comes."""
        if self._coming:
            self._clock.wait_until(self._coming[-1][1].arrival)


def drive(
    requests: list[Request],
    add: Callable[[int, Request], None],
    step: Callable[[], list[tuple[int, int]]],
) -> list[Served]:
    """Serve with an engine that is stepped: `add` takes a request, `step` returns (place, token) pairs."""
    served = [Served([], []) for _ in requests]
    clock = Clock()
    arrivals = Arrivals(requests, clock)
    num_running = 0
    while num_running or not arrivals.are_over:
        if not num_running:
            arrivals.wait()
        for place, request in arrivals.due():
            add(place, request)
            num_running += 1
        if not num_running:
            continue
        tokens = step()
        now = clock.now()
        for place, token in tokens:
            served[place].tokens.append(token)
            served[place].times.append(now)
            num_running -= len(served[place].tokens) == requests[place].max_tokens
    return served


def serve(peer: Peer) -> None:
    """Answer until the harness closes stdin."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = {"ok": True, **answered(peer, json.loads(line))}
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is reported, and the next line is read
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        say(answers, answer)


def answered(peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
    """Do what one line says. Raises what the engine raises."""
    if message["op"] == "load":
        return {"details": peer.load(Settings(**message["settings"]))}
    served = peer.run([Request(*one) for one in message["requests"]])
    return {
        "tokens": [one.tokens for one in served],
        "times": [[round(time, 6) for time in one.times] for one in served],
        "details": getattr(peer, "details", {}),
    }


def say(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def die_with_parent() -> None:
    """Be killed with the harness, also while stopped. Linux only; elsewhere the end of stdin must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
