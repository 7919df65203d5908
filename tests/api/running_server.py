"""Runs `python -m api` with real sockets, for tests."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any
from urllib.error import HTTPError

LISTENING = re.compile(rb"listening.* url=(http://\S+)")


class Server:
    """One running API."""

    def __init__(self, redis_url: str, home: Any, **environ: Any) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api"],
            env={**os.environ, "REDIS_URL": redis_url, "TOKENMILL_PORT": "0", "HOME": str(home), **environ},
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        self._stderr = self.process.stderr
        self.log: list[bytes] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._listening.wait(60), self.log
        found = LISTENING.search(b"".join(self.log))
        assert found, self.log
        self.url = found[1].decode()
        assert self.call("GET", "/livez")[0] == 200

    @property
    def address(self) -> Any:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def _read(self) -> None:
        for line in self._stderr:
            self.log.append(line)
            if LISTENING.search(line):
                self._listening.set()
        self._listening.set()

    def call(self, method: str, path: str, body: Any = None, **headers: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method, headers=headers)
        if data:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read()
        except HTTPError as error:
            with error:
                return error.code, error.read()

    def submit(self, **fields: Any) -> Any:
        status, body = self.call("POST", "/v1/tasks", {"prompt": "x", **fields})
        assert status == 202
        return json.loads(body)["id"]

    def open(self, path: str) -> Any:
        """A connection that has requested `path` and received the head of the reply."""
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        assert b" 200 OK" in head
        return connection

    def open_streams(self) -> Any:
        metrics = self.call("GET", "/metrics")[1].decode()
        found = re.search(r"^tokenmill_http_streams_open (\S+)$", metrics, re.M)
        assert found, metrics
        return int(float(found[1]))

    def wait_for_streams(self, number: int) -> None:
        while self.open_streams() != number:
            time.sleep(0.02)

    def stop(self, sig: Any = signal.SIGTERM) -> Any:
        self.process.send_signal(sig)
        code = self.process.wait(60)
        self.close()
        return code

    def close(self) -> None:
        # The pipe ends with the last process that holds it.
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self._reader.join(60)
        assert not self._reader.is_alive(), "a process of the server lives on"
        self._stderr.close()


def read_all(connection: socket.socket) -> Any:
    with connection:
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received


def unread(server: Server, request: Any, receive_bytes: Any = 4096) -> Any:
    """A connection that sends `request` and reads no byte of the reply."""
    connection = socket.socket()
    # Set before connecting, when the receive window is announced.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect(server.address)
    connection.sendall(request)
    return connection


def resident_bytes(process: Any) -> Any:
    """The memory of a process that is in use."""
    with open(f"/proc/{process.pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
