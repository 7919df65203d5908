"""Events of sockets reach the connection that they were reported for."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from api.http.poller import Poller


class Dispatcher:
    """Waits for input. `on_read` is called when there is some."""

    accepting = False

    def __init__(self, sock: Any, on_read: Any) -> None:
        self.sock = sock
        self._fileno = sock.fileno()
        self.on_read = on_read
        self.closed = 0

    def readable(self) -> Any:
        return True

    def writable(self) -> Any:
        return False

    def handle_read_event(self) -> None:
        self.on_read()

    def handle_expt_event(self) -> None:
        pass

    def handle_close(self) -> None:
        self.closed += 1

    def handle_error(self) -> None:
        raise


@pytest.fixture
def pairs() -> Iterator[Any]:
    opened = [socket.socketpair() for _ in range(3)]
    yield opened
    for pair in opened:
        for sock in pair:
            sock.close()


def test_a_reused_descriptor_gets_no_event_of_its_previous_owner(pairs: Any) -> None:
    """Both are ready at once. The first closes the other, and a new connection reuses its descriptor."""
    dispatchers: dict[int, Dispatcher] = {}
    poller = Poller(dispatchers)
    (first, first_peer), (old, old_peer), (new, _) = pairs
    number = old.fileno()
    made = []

    def unexpected() -> None:
        raise AssertionError("an event of a connection that is closed")

    def replace() -> None:
        first.recv(1)
        poller.unregister(number)
        old.close()
        again = socket.socket(fileno=os.dup2(new.fileno(), number))
        dispatchers[number] = Dispatcher(again, unexpected)
        made.append(dispatchers[number])

    dispatchers[first.fileno()] = Dispatcher(first, replace)
    dispatchers[number] = Dispatcher(old, unexpected)
    poller.update_all()
    first_peer.send(b"x")
    # The end of both sides: poll reports a hang-up.
    old_peer.close()
    poller.poll(60)
    assert made
    assert not made[0].closed
    made[0].sock.close()
