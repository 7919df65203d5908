"""Clients that send nothing, too little or garbage, or read nothing: others are still served.

gunicorn#3519 (a deadline for the first byte alone), gunicorn#2010 (clients that vanish), waitress#433 (half a
request holds a worker). Each assertion is about order, counts or state; times are watchdogs.
"""

import contextlib
import json
import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from api.networks import network_of
from tests.api.conftest import HandWorker, StartServer, Submit
from tests.api.running_server import Server, read_all, resident_bytes, unread

TINY = {
    "TOKENMILL_HTTP_THREADS": "4",
    "TOKENMILL_MAX_STREAMS": "3",
    "TOKENMILL_HTTP_READ_SECONDS": "1",
    "TOKENMILL_HTTP_WRITE_SECONDS": "1",
}
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MIB = 1024 * 1024


@pytest.fixture
def keep() -> Iterator[Any]:
    """Connects, sends, and keeps the connection until the end of the test."""
    with contextlib.ExitStack() as stack:

        def keep(server: Server, data: bytes = b"") -> Any:
            return stack.enter_context(connect(server, data))

        yield keep


@pytest.fixture
def keep_unread() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def keep(server: Server, data: bytes) -> Any:
            return stack.enter_context(unread(server, data))

        yield keep


def connect(server: Server, data: bytes = b"") -> Any:
    connection = socket.create_connection(server.address, timeout=60)
    connection.sendall(data)
    return connection


def problem(received: Any) -> Any:
    """The status and the code of a reply that must be a problem."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"\r\nContent-Type: application/problem+json" in head, received
    error = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % error["status"])
    assert error["request_id"] in head.decode()
    return error["status"], error["error"]["code"]


def ask(server: Server, data: bytes) -> Any:
    """Everything that a server sends to a client that sends `data` and then waits."""
    return read_all(connect(server, data))


def wait_for_close(connection: socket.socket) -> None:
    """Reads until the server has ended the connection, however it does that."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


def wait_for_reset(connection: socket.socket) -> None:
    """Waits, without reading a byte, until the server has reset the connection."""
    poll = select.poll()
    poll.register(connection, 0)
    assert poll.poll(300_000)


class TestHalfRequests:
    def test_liveness_works_beside_many_incomplete_heads(self, start: StartServer) -> None:
        """None of them is refused or closed first: their deadline is far off."""
        server = start(TOKENMILL_HTTP_READ_SECONDS="600")
        with contextlib.ExitStack() as stack:
            for _ in range(256):
                stack.enter_context(connect(server, b"GET /v1/tasks HTTP/1.1\r\nX-Slow: 1\r\n"))
            for _ in range(10):
                assert server.call("GET", "/livez")[0] == 200
            assert server.submit()

    @pytest.mark.parametrize(
        ("sent", "code"),
        [
            (b"GET /livez HTTP/1.1\r\nHost: x\r\n", "head_timeout"),
            (b"G", "head_timeout"),
            (POST + b"Content-Length: 100\r\n\r\n{", "body_timeout"),
            (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", "body_timeout"),
        ],
    )
    def test_a_request_that_stops_coming_is_answered_and_closed(
        self, start: StartServer, sent: Any, code: str
    ) -> None:
        assert problem(ask(start(**TINY), sent)) == (408, code)

    def test_a_request_that_trickles_in_is_answered_and_closed(self, start: StartServer) -> None:
        """A byte does not extend the deadline."""
        connection = connect(start(**TINY), b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        enough = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not enough.wait(0.2):
                    connection.sendall(b"a")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert problem(read_all(connection)) == (408, "head_timeout")
        finally:
            enough.set()
            thread.join()

    def test_a_connection_that_sends_nothing_is_closed(self, start: StartServer) -> None:
        assert ask(start(**TINY), b"") == b""

    def test_more_half_bodies_than_threads(self, start: StartServer) -> None:
        server = start(**{**TINY, "TOKENMILL_HTTP_READ_SECONDS": "600"})
        with contextlib.ExitStack() as stack:
            for _ in range(64):
                stack.enter_context(connect(server, POST + b"Content-Length: 100\r\n\r\n{"))
            assert server.call("GET", "/livez")[0] == 200
            assert server.submit()

    def test_closing_the_sending_side_early_is_an_error(self, server: Server) -> None:
        with connect(server, b"GET /livez HTTP/1.1\r\nHost: x\r\n") as connection:
            connection.shutdown(socket.SHUT_WR)
            assert problem(read_all(connection)) == (400, "incomplete_request")

    def test_closing_the_sending_side_after_the_request_is_allowed(self, server: Server) -> None:
        """As `nc -N` does."""
        with connect(server, LIVEZ) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection).startswith(b"HTTP/1.1 200 ")


class TestLimitsOnConnections:
    def test_an_idle_connection_makes_room_for_a_new_one(self, start: StartServer, keep: Any) -> None:
        server = start(TOKENMILL_MAX_CONNECTIONS_PER_ADDRESS="3", TOKENMILL_HTTP_READ_SECONDS="600")
        idle = [keep(server, b"GET /") for _ in range(3)]
        assert server.submit()
        wait_for_close(idle[0])

    def test_beyond_the_limit_only_liveness_is_answered(self, start: StartServer) -> None:
        """If no connection is idle. Streams continue."""
        server = start(TOKENMILL_MAX_CONNECTIONS_PER_ADDRESS="2")
        task_id = server.submit()
        streams = [server.open(f"/v1/tasks/{task_id}/events") for _ in range(2)]
        assert ask(server, LIVEZ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")).endswith(b"}")
        path = f"GET /v1/tasks/{task_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        assert problem(ask(server, path)) == (503, "too_many_connections")
        streams[0].close()
        # Its connection counts until the server notices the disconnect.
        while server.call("DELETE", f"/v1/tasks/{task_id}")[0] != 200:
            pass
        assert b"event: finished" in read_all(streams[1])

    def test_zero_means_no_limit(self, start: StartServer, keep: Any) -> None:
        server = start(TOKENMILL_MAX_CONNECTIONS_PER_ADDRESS="0", TOKENMILL_HTTP_READ_SECONDS="600")
        for _ in range(600):
            keep(server, b"GET /")
        assert server.submit()

    def test_more_than_all_connections_at_once(self, start: StartServer, keep: Any) -> None:
        """Four threads allow 16 connections; the newest are served."""
        server = start(**TINY, TOKENMILL_MAX_CONNECTIONS_PER_ADDRESS="0")
        idle = [keep(server) for _ in range(100)]
        assert server.call("GET", "/livez")[0] == 200
        assert server.submit()
        for connection in idle:
            wait_for_close(connection)


class TestEndsOfConnections:
    @pytest.mark.parametrize(
        "request_",
        [
            b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"GET /livez HTTP/1.0\r\n\r\n",
            b"\x16\x03\x01garbage\r\n\r\n",
        ],
    )
    def test_sockets_kept_open_after_the_reply_block_no_other_client(
        self, start: StartServer, keep: Any, request_: Any
    ) -> None:
        """More of them than threads, each answered before any is closed."""
        server = start(**TINY)
        kept = []
        for _ in range(20):
            kept.append(keep(server, request_))
            assert kept[-1].recv(65536).startswith(b"HTTP/1.")
            assert server.call("GET", "/livez")[0] == 200
            assert server.submit()
        for connection in kept:
            wait_for_close(connection)

    def test_the_reply_reaches_a_client_that_still_sends(self, start: StartServer) -> None:
        """A close with unread bytes would reset the connection, and the reply would be lost with it."""
        server = start()
        with connect(server, POST + b"Content-Length: 50000000\r\n\r\n") as connection:
            for _ in range(50):
                connection.sendall(b" " * 1_000_000)
            assert problem(read_all(connection)) == (413, "body_too_large")

    def test_pipelined_requests_are_answered_in_order(self, server: Server) -> None:
        tasks = [server.submit() for _ in range(3)]
        requests = [f"GET /v1/tasks/{task_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for task_id in tasks]
        requests.append(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = ask(server, b"".join(requests))
        assert re.findall(rb'^\{"id":"(\w+)"', received, re.M) == [task_id.encode() for task_id in tasks]
        assert received.count(b"HTTP/1.1 200 ") == 4

    def test_many_pipelined_requests_whose_replies_are_not_read(self, start: StartServer) -> None:
        server = start(**TINY)
        with unread(server, LIVEZ * 60_000) as connection:
            assert server.submit()
            wait_for_reset(connection)


@pytest.fixture
def long_log(worker: HandWorker, submit: Submit) -> Any:
    """An ended task of 8 MB."""
    task_id = submit()
    worker.claim()
    worker.start(task_id)
    for _ in range(40):
        worker.say(task_id, *["x" * 2000] * 100)
    worker.finish(task_id)
    return task_id


class TestClientsThatNeverRead:
    @pytest.mark.parametrize("path", ["/v1/tasks/{}/events", "/v1/tasks/{}"])
    def test_they_hold_neither_threads_nor_slots(
        self, start: StartServer, keep_unread: Any, long_log: str, path: str
    ) -> None:
        server = start(TOKENMILL_HTTP_WRITE_SECONDS="5", TOKENMILL_MAX_STREAMS="128")
        request = f"GET {path.format(long_log)} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        before = resident_bytes(server.process)
        readers = [keep_unread(server, request) for _ in range(64)]
        assert server.call("GET", "/livez")[0] == 200
        if path.endswith("events"):
            server.wait_for_streams(64)
            # The replies have 64 times 8 MB in all.
            assert resident_bytes(server.process) - before < 200 * MIB
        for connection in readers:
            wait_for_reset(connection)
        server.wait_for_streams(0)
        assert server.submit()

    def test_a_reset_during_the_last_reply_is_not_a_server_error(
        self, start: StartServer, keep_unread: Any, long_log: str
    ) -> None:
        """The reply is complete and waits in the buffer of a connection that closes after it."""
        server = start()
        request = f"GET /v1/tasks/{long_log} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        readers = [keep_unread(server, request) for _ in range(8)]
        for connection in readers:
            assert connection.recv(1)
            # With no time to linger, `close` resets the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        # The server accepts this connection after it has seen the resets.
        assert server.call("GET", "/livez")[0] == 200
        assert server.stop() == 0
        assert not [line for line in server.log if b"ERROR" in line]

    def test_a_stream_of_an_ended_task_takes_a_slot(
        self, start: StartServer, keep_unread: Any, long_log: str
    ) -> None:
        server = start(**{**TINY, "TOKENMILL_HTTP_WRITE_SECONDS": "600"})
        path = f"/v1/tasks/{long_log}/events"
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        readers = [keep_unread(server, request) for _ in range(3)]
        server.wait_for_streams(3)
        status, body = server.call("GET", path)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_streams")
        # A released slot serves the next stream completely.
        readers[0].close()
        server.wait_for_streams(2)
        status, body = server.call("GET", path)
        assert status == 200
        assert [int(seq) for seq in re.findall(rb"^id: (\d+)$", body, re.M)] == list(range(4001))
        for connection in readers[1:]:
            connection.close()
        server.wait_for_streams(0)

    def test_a_live_stream_that_is_not_read_releases_its_slot(
        self, start: StartServer, submit: Submit, worker: HandWorker
    ) -> None:
        server = start(**TINY)
        task_id = submit()
        worker.claim()
        with unread(server, f"GET /v1/tasks/{task_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode()):
            server.wait_for_streams(1)
            for _ in range(40):
                worker.say(task_id, *["x" * 2000] * 100)
            server.wait_for_streams(0)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_all_addresses_of_one_client_count_as_one(address: str, network: str) -> None:
    assert network_of(address) == network


def test_long_polls_up_to_the_limit_are_not_refused(
    start: StartServer, submit: Submit, worker: HandWorker
) -> None:
    """redis-py's pool has 100 connections by default, and the 101st call failed as if Redis were down."""
    server = start()
    task_id = submit()
    statuses = []
    together = threading.Barrier(200)

    def poll() -> None:
        together.wait()
        statuses.append(server.call("GET", f"/v1/tasks/{task_id}?wait=60")[0])

    threads = [threading.Thread(target=poll) for _ in range(200)]
    for thread in threads:
        thread.start()
    worker.run("a")
    for thread in threads:
        thread.join()
    assert statuses == [200] * 200


def test_200_submissions_and_streams_at_once(start: StartServer, redis_url: str) -> None:
    server = start()
    ids = [server.submit() for _ in range(100)]
    statuses = []
    together = threading.Barrier(200)

    def call(method: str, path: str, body: Any) -> None:
        together.wait()
        if method == "POST":
            statuses.append(server.call(method, path, body)[0])
        else:
            with server.open(path):
                statuses.append(202)

    calls: list[tuple[str, str, Any]] = [("POST", "/v1/tasks", {"prompt": "x"})] * 100
    calls += [("GET", f"/v1/tasks/{task_id}/events", None) for task_id in ids]
    threads = [threading.Thread(target=call, args=each) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [202] * 200
