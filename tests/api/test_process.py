"""`python -m api` with real sockets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from api.process import stop_on_signals
from api.shutdown import Shutdown
from tests.api.conftest import HandWorker, StartServer, Submit
from tests.api.running_server import Server, read_all


def test_streams_outlive_the_servers_own_timeout(start: StartServer, worker: HandWorker) -> None:
    """gunicorn#2537, #1186: streams were ended by a limit meant for clients that send or read nothing."""
    server = start(TOKENMILL_HTTP_READ_SECONDS="1", TOKENMILL_HTTP_WRITE_SECONDS="1")
    ids = [server.submit() for _ in range(4)]
    streams = [server.open(f"/v1/tasks/{task_id}/events") for task_id in ids]
    server.wait_for_streams(4)
    assert sorted(worker.claim(4)) == sorted(ids)
    for _ in range(2):
        for task_id in ids:
            worker.say(task_id, "x")
        # Silent for twice the timeout, while other routes are answered.
        spoke = time.monotonic()
        while time.monotonic() - spoke < 2:
            assert server.call("GET", f"/v1/tasks/{ids[0]}")[0] == 200
            time.sleep(0.1)
    for task_id in ids:
        worker.finish(task_id)
    for connection in streams:
        received = read_all(connection)
        assert received.count(b"event: token\n") == worker.lengths[ids[0]] - 1
        assert received.count(b"event: finished\n") == 1
    assert not [line for line in server.log if b"TIMEOUT" in line or b"Traceback" in line]


def test_a_disconnect_is_noticed_while_nothing_is_sent(server: Server, redis_url: str) -> None:
    """werkzeug#1649, llama.cpp#24496: no write can fail here, as no heartbeat is due."""
    task_id = server.submit()
    streams = [server.open(f"/v1/tasks/{task_id}/events") for _ in range(3)]
    server.wait_for_streams(3)
    streams[0].close()
    # A reset instead of an orderly end.
    streams[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    streams[1].close()
    server.wait_for_streams(1)
    # The task is not cancelled by that.
    assert json.loads(server.call("GET", f"/v1/tasks/{task_id}")[1])["status"] == "queued"
    server.call("DELETE", f"/v1/tasks/{task_id}")
    assert b"event: finished" in read_all(streams[2])
    server.wait_for_streams(0)


def test_a_slow_reader_gets_everything(server: Server, submit: Submit, worker: HandWorker) -> None:
    """redis-py#1261: a slow reader lost events or delayed the others. 6 MB are sent."""
    task_id, other = submit(), submit()
    worker.claim(2)
    with server.open(f"/v1/tasks/{task_id}/events") as slow:
        word = "x" * 2000
        for _ in range(30):
            worker.say(task_id, *[word] * 100)
            worker.say(other, "y")
        worker.finish(task_id)
        worker.finish(other)
        assert read_all(server.open(f"/v1/tasks/{other}/events")).count(b"event: token\n") == 30
        received = read_all(slow)
    assert [int(seq) for seq in re.findall(rb"^id: (\d+)$", received, re.M)] == list(range(3001))


def test_a_waiting_poll_that_disconnects_releases_its_slot(start: StartServer) -> None:
    server = start(TOKENMILL_HTTP_THREADS="4", TOKENMILL_MAX_STREAMS="1")
    url = f"/v1/tasks/{server.submit()}"

    def slot_is_free() -> Any:
        # A poll without a slot does not wait; one that has waited releases its slot.
        began = time.monotonic()
        server.call("GET", f"{url}?wait=0.5")
        return time.monotonic() - began >= 0.5

    is_waiting = False
    while not is_waiting:
        with socket.create_connection(server.address) as connection:
            connection.sendall(f"GET {url}?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            # If the other poll was read first, this one found no slot and was answered at once.
            is_waiting = not slot_is_free()
    while not slot_is_free():
        pass


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_in_time_with_streams_open(start: StartServer, sig: Any) -> None:
    """Waiting for streams would take forever; the clients are notified and reconnect."""
    server = start(TOKENMILL_HEARTBEAT_SECONDS="600", TOKENMILL_HTTP_GRACE_SECONDS="50")
    task_id = server.submit()
    streams = [server.open(f"/v1/tasks/{task_id}/events") for _ in range(3)]
    poll = server.open(f"/v1/tasks/{task_id}?wait=60")
    server.wait_for_streams(3)
    began = time.monotonic()
    assert server.stop(sig) == 0
    # Far below the grace period of open calls.
    assert time.monotonic() - began < 25
    if sig is signal.SIGTERM:
        for connection in streams:
            assert b": the server is stopping" in read_all(connection)
    for connection in (*streams, poll):
        connection.close()


def test_a_killed_server_frees_its_port(start: StartServer) -> None:
    """None of its processes survives, even with a stream open."""
    server = start(TOKENMILL_HEARTBEAT_SECONDS="600")
    stream = server.open(f"/v1/tasks/{server.submit()}/events")
    server.wait_for_streams(1)
    server.process.kill()
    server.process.wait()
    server.close()
    read_all(stream)
    port = server.address[1]
    assert start(TOKENMILL_PORT=str(port)).address[1] == port


def test_a_second_signal_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for open calls, the second one does not."""
    said = []
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "_exit", lambda code: said.append(f"exit {code}"))
    shutdown = Shutdown()
    stop_on_signals(lambda: said.append("woken"), shutdown)
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT}
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert (shutdown.requested, said) == (True, ["woken"])
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert said[1] == "exit 1"


def test_a_stream_resumes_after_a_restart(start: StartServer, worker: HandWorker) -> None:
    """The client reconnects to another process with the last id."""
    first = start()
    task_id = first.submit()
    worker.claim()
    worker.say(task_id, "a", "b")
    stream = first.open(f"/v1/tasks/{task_id}/events")
    received = b""
    while b"id: 1\n" not in received:
        received += stream.recv(4096)
    first.stop()
    ids = re.findall(rb"^id: (\d+)$", received + read_all(stream), re.M)
    worker.say(task_id, "c")
    worker.finish(task_id)
    _, rest = start().call("GET", f"/v1/tasks/{task_id}/events", **{"Last-Event-ID": ids[-1].decode()})
    ids += re.findall(rb"^id: (\d+)$", rest, re.M)
    assert [int(seq) for seq in ids] == [0, 1, 2, 3]


def test_a_huge_body_is_refused_and_the_next_call_works(server: Server, redis_url: str) -> None:
    """llama.cpp#19367: 50 MB, without delaying other clients."""
    status, body = server.call("POST", "/v1/tasks", {"prompt": "x" * 50_000_000})
    assert status == 413
    assert json.loads(body)["error"]["param"] == "body"
    assert server.submit()


@pytest.mark.parametrize(("size", "status"), [(2 * 1024 * 1024, b"202"), (2 * 1024 * 1024 + 1, b"413")])
def test_a_body_of_unknown_length_is_bounded_too(
    server: Server, redis_url: str, size: int, status: bytes
) -> None:
    """A chunked body has no length: it is refused when it exceeds the limit, and never truncated."""
    body = b'{"prompt": "x"}'.ljust(size)
    with socket.create_connection(server.address, timeout=60) as connection:
        head = "POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (size, body))
        assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Transfer-Encoding: chunked", b"zz\r\nx\r\n"),
        ("Transfer-Encoding: chunked", b"5\r\n{}\r\n"),
        ("Content-Length: 0", b""),
        ("X-Nothing: 1", b""),
    ],
)
def test_a_broken_or_missing_body_is_a_400(server: Server, redis_url: str, headers: Any, body: Any) -> None:
    """flask-jwt-extended#74: a missing body was a 500. Invalid chunks are covered too."""
    with socket.create_connection(server.address, timeout=60) as connection:
        head = "POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}{headers}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in received


def test_no_files_are_left_behind(start: StartServer) -> None:
    server = start()
    assert server.stop() == 0
    assert list(server.home.iterdir()) == []


def run_to_its_end(**environ: Any) -> Any:
    command = [sys.executable, "-m", "api"]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("environ", "code", "words"),
    [
        ({"TOKENMILL_PORT": "http"}, 78, "TOKENMILL_PORT must be a whole number"),
        # Temporary errors: the name may become known later.
        ({"TOKENMILL_HOST": "host.invalid"}, 1, "set TOKENMILL_HOST to an address of this machine"),
        ({"TOKENMILL_HOST": "a..b"}, 1, "set TOKENMILL_HOST to an address of this machine"),
        ({"TOKENMILL_HOST": "192.0.2.1"}, 1, "set TOKENMILL_HOST to an address of this machine"),
    ],
)
def test_a_failed_start_is_explained_in_one_line(environ: Any, code: str, words: Any) -> None:
    process = run_to_its_end(**environ)
    assert process.returncode == code
    assert words in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_a_port_in_use_is_named_and_is_not_a_configuration_error(server: Server) -> None:
    port = str(server.address[1])
    process = run_to_its_end(TOKENMILL_PORT=port)
    assert process.returncode == 1
    assert f"port {port}: the port is in use; set TOKENMILL_PORT to a free one" in process.stderr
