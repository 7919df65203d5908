"""Requests that are not HTTP, almost HTTP, or HTTP that two servers could parse differently.

Each is answered with the status that says what is wrong, as a problem, or its connection is closed; the
server answers the next client. Request smuggling: RFC 9112 section 11.2, gunicorn#3278.
"""

import json
import re
import socket
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from waitress.adjustments import Adjustments

from api.http.requests import MAX_HEAD_BYTES, MAX_HEADERS, MAX_LINE_BYTES, RequestParser
from tests.api.conftest import HandWorker, Submit
from tests.api.running_server import Server, read_all

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
TASK = b'{"prompt": "x"}'
LIMIT = 2 * 1024 * 1024

REFUSED = {
    # The request line.
    "binary": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no http": (b"hello\r\n", 400),
    "lower case": (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "bare lf": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
    "bare cr": (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rC: d\r\n\r\n", 400),
    "space in url": (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "broken url": (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "http/0.9": (b"GET /livez\r\n\r\n", 505),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "http/3": (b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505),
    "long url": (b"GET /" + b"a" * MAX_LINE_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "endless url": (b"GET /" + b"a" * 2 * MAX_LINE_BYTES, 414),
    # Headers.
    "no host": (b"GET /livez HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"Host: y\r\n\r\n", 400),
    "bad host": (b"GET /livez HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "null byte": (GET + b"A: b\0c\r\n\r\n", 400),
    "no colon": (GET + b"nothing\r\n\r\n", 400),
    "space before colon": (GET + b"A : b\r\n\r\n", 400),
    "many headers": (GET + b"A: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
    "long header": (GET + b"A: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    "unknown expectation": (GET + b"Expect: the-unexpected\r\n\r\n", 417),
    # Framing.
    "two lengths": (POST + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + TASK, 400),
    "list of lengths": (POST + b"Content-Length: 15, 15\r\n\r\n" + TASK, 400),
    "signed length": (POST + b"Content-Length: +15\r\n\r\n" + TASK, 400),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "hex length": (POST + b"Content-Length: 0xf\r\n\r\n" + TASK, 400),
    "endless length": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "length and chunks": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks twice": (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400),
    "gzip chunks": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "identity": (POST + b"Transfer-Encoding: identity\r\n\r\n", 501),
    "near chunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "chunks of 1.0": (POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "hidden chunks": (POST + b"Transfer-Encoding\x0b: chunked\r\n\r\n0\r\n\r\n", 400),
    "no chunk size": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "negative chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
    "chunk without end": (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX", 400),
    "endless chunk size": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, 400),
    "huge chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", 413),
    "large body": (POST + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1), 413),
    "large body, expected": (POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1), 413),
    "long trailer": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"b" * 100_000 + b"\r\n\r\n", 431,
    ),
}  # fmt: skip


def ask(server: Server, data: bytes) -> Any:
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(data)
        return read_all(connection)


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_request_is_answered_with_a_problem_and_closed(
    server: Server, redis_url: str, name: str
) -> None:
    data, status = REFUSED[name]
    received = ask(server, data)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), received
    assert b"Content-Type: application/problem+json" in head
    assert b"Connection: close" in head
    problem = json.loads(body)
    assert problem["status"] == status
    assert problem["error"]["code"]
    # The error contains neither a library's message nor any input.
    assert not re.search("Error|invalid literal|Traceback|waitress|generated by", body.decode())
    assert server.call("GET", "/livez")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        # A server that reads the length and one that reads the chunks see different requests here.
        POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET + b"\r\n",
        POST + b"Content-Length: 0\r\nContent-Length: 35\r\n\r\n" + GET + b"\r\n",
    ],
)
def test_nothing_after_an_invalid_request_is_answered(server: Server, redis_url: str, data: bytes) -> None:
    assert ask(server, data).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /livez HTTP/1.0\r\n\r\n", 200),
        (b"\r\n\r\n" + GET + b"Connection: close\r\n\r\n", 200),
        (b"GET http://x/livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (GET + b"Expect: 100-continue\r\nConnection: close\r\n\r\n", 200),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /v1/tasks/%ff%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET //livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (POST + b"Connection: close\r\nContent-Length: 15\r\n\r\n" + TASK, 202),
        (CHUNKED + b"f\r\n" + TASK + b"\r\n0\r\n\r\n", 202),
        (
            CHUNKED.replace(b"chunked", b"CHUNKED") + b"8;a=b\r\n" + TASK[:8] + b"\r\n7\r\n" + TASK[8:]
            + b"\r\n0\r\nTrailer: x\r\n\r\n",
            202,
        ),
    ],
)  # fmt: skip
def test_unusual_requests_are_served(server: Server, redis_url: str, data: bytes, status: int) -> None:
    assert re.match(rb"HTTP/1\.[01] %d " % status, ask(server, data))


def test_expect_100_continue_is_answered(server: Server, redis_url: str) -> None:
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 15\r\n\r\n")
        leave = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connection.recv(len(leave), socket.MSG_WAITALL) == leave
        connection.sendall(TASK)
        assert read_all(connection).startswith(b"HTTP/1.1 202 ")


def test_a_reply_to_head_has_no_body(server: Server, worker: HandWorker, submit: Submit) -> None:
    task_id = submit()
    worker.run("a")
    for path in ("/livez", f"/v1/tasks/{task_id}", f"/v1/tasks/{task_id}/events", "/nope"):
        head = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        assert ask(server, head).endswith(b"\r\n\r\n")
        assert ask(server, head).count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
def test_a_body_in_small_chunks_is_bounded_by_its_own_size(server: Server, redis_url: str, size: int) -> None:
    chunks = b"10\r\n%s\r\n" % (b" " * 16) * ((size - len(TASK)) // 16)
    last = size - len(TASK) - (size - len(TASK)) // 16 * 16
    chunks += b"%x\r\n%s\r\n" % (len(TASK) + last, TASK + b" " * last)
    received = ask(
        server, POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    )
    assert received.startswith(b"HTTP/1.1 202 " if size <= LIMIT else b"HTTP/1.1 413 ")


PARTS = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [
            b"GET", b"POST", b" ", b"/", b"/livez", b"/v1/tasks", b" HTTP/1.1", b" HTTP/1.0", b"\r\n",
            b"\r\n\r\n", b"\n", b"Host: x\r\n", b"Content-Length: ", b"5", b"-1", b"99999999999",
            b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n",
            b"0\r\n\r\n", b"5\r\n", b"{}", b"\0", b"\xff", b":", b";",
        ]
    ),
)  # fmt: skip
GARBAGE = st.tuples(st.sampled_from([b"", GET, POST]), st.lists(PARTS, max_size=20).map(b"".join)).map(
    b"".join
)


@given(GARBAGE)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@example(GET + b"\r\n" + b"\0" * 100)
def test_any_bytes_are_answered_or_closed_and_the_server_survives(
    server: Server, redis_url: str, data: bytes
) -> None:
    with socket.create_connection(server.address, timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            received = read_all(connection)
        except ConnectionError:
            received = b""
    assert received == b"" or received.startswith((b"HTTP/1.1 ", b"HTTP/1.0 "))
    assert not received.startswith(b"HTTP/1.1 500")
    assert server.call("GET", "/livez")[0] == 200


@given(data=GARBAGE, cuts=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_the_parser_never_raises_and_does_not_depend_on_how_bytes_arrive(data: bytes, cuts: Any) -> None:
    adjustments = Adjustments(max_request_header_size=MAX_HEAD_BYTES, max_request_body_size=101)

    def read(pieces: Any) -> Any:
        parser = RequestParser(adjustments)
        for piece in pieces:
            while piece and not parser.completed:
                taken = parser.received(piece)
                assert 0 < taken <= len(piece)
                piece = piece[taken:]
        error = parser.error and parser.error.status
        return parser.completed, error, parser.headers if not error else None

    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[begin:end] for begin, end in pairwise(ends)]
    assert read(pieces) == read([data])
