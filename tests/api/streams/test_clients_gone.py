"""Disconnects on real sockets: noticed while nothing is sent, and the task is cancelled.

llama.cpp#24496, ollama#11889, mlx-openai-server#269, werkzeug#1649: generation continued without a client, or
a disconnect before the first byte was never noticed. No heartbeat is due here.
"""

import json
import socket
import time
from typing import Any, cast

import pytest
import redis

from tests.api.conftest import HandWorker, StartServer
from tests.api.running_server import Server
from tokenmill.protocol import keys


def wait_for_end(server: Server, task_id: str) -> Any:
    while (task := json.loads(server.call("GET", f"/v1/tasks/{task_id}")[1]))["status"] not in (
        "completed", "failed", "cancelled",
    ):  # fmt: skip
        time.sleep(0.02)
    return task


def test_a_disconnect_in_the_middle_of_a_stream(server: Server, redis_url: str, worker: HandWorker) -> None:
    task_id = server.submit(on_disconnect="cancel")
    worker.claim()
    worker.start(task_id)
    with server.open(f"/v1/tasks/{task_id}/events") as connection:
        worker.say(task_id, "a", "b")
        received = b""
        while b"id: 1\n" not in received:
            received += connection.recv(4096)
    task = wait_for_end(server, task_id)
    assert (task["status"], task["outputs"][0]["text"]) == ("cancelled", "ab")
    # Later tokens of its worker are refused.
    worker.say(task_id, "c")
    assert wait_for_end(server, task_id) == task


@pytest.mark.parametrize("reset", [False, True])
def test_a_disconnect_while_the_task_is_queued(
    server: Server, redis_url: str, worker: HandWorker, reset: Any
) -> None:
    """No token is computed for it, and the other task is not affected."""
    first, second = server.submit(), server.submit(on_disconnect="cancel")
    with server.open(f"/v1/tasks/{second}/events") as connection:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    task = wait_for_end(server, second)
    assert (task["status"], task["usage"]["completion_tokens"]) == ("cancelled", 0)
    assert worker.claim(2) == [first]


@pytest.mark.parametrize("how", ["poll", "submission"])
def test_a_disconnect_during_a_wait(
    server: Server, redis_url: str, worker: HandWorker, how: Any, redis_client: redis.Redis
) -> None:
    head = "Host: x\r\nContent-Type: application/json\r\nPrefer: wait=60\r\n"
    with socket.create_connection(server.address) as connection:
        if how == "poll":
            task_id = server.submit(on_disconnect="cancel")
            connection.sendall(f"GET /v1/tasks/{task_id}?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        else:
            body = b'{"prompt": "x", "on_disconnect": "cancel"}'
            length = f"Content-Length: {len(body)}\r\n\r\n"
            connection.sendall(f"POST /v1/tasks HTTP/1.1\r\n{head}{length}".encode() + body)
        while not (watched := redis_client.zrange(keys.WATCHED, 0, -1)):
            time.sleep(0.02)
    assert wait_for_end(server, cast(bytes, watched[0]).decode())["status"] == "cancelled"


def test_the_last_of_several_readers_disconnects(server: Server, redis_url: str) -> None:
    task_id = server.submit(on_disconnect="cancel")
    first, second = (server.open(f"/v1/tasks/{task_id}/events") for _ in range(2))
    server.wait_for_streams(2)
    first.close()
    server.wait_for_streams(1)
    assert json.loads(server.call("GET", f"/v1/tasks/{task_id}")[1])["status"] == "queued"
    second.close()
    assert wait_for_end(server, task_id)["status"] == "cancelled"


def test_readers_of_a_killed_server_expire(
    start: StartServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    task_id = server.submit(on_disconnect="cancel")
    with server.open(f"/v1/tasks/{task_id}/events"):
        while not redis_client.zcard(keys.WATCHED):
            time.sleep(0.02)
        server.process.kill()
        server.process.wait()
    # The lease expires, and another server's reaper runs.
    redis_client.delete(keys.readers(task_id))
    redis_client.zadd(keys.WATCHED, {task_id: 1})
    assert wait_for_end(start(), task_id)["status"] == "cancelled"
