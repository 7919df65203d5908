"""A small HTTP receiver on a real socket. The test sets its behaviour for each call in turn."""

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Behaviour = Callable[[socket.socket, "Call"], None]


@dataclass(frozen=True)
class Call:
    """One received request."""

    line: str
    headers: dict[str, str]
    body: bytes


def answer(status: int, *headers: str) -> Behaviour:
    def behave(connection: socket.socket, call: Call) -> None:
        lines = [f"HTTP/1.1 {status} X", "Content-Length: 2", *headers, "", "ok"]
        connection.sendall("\r\n".join(lines).encode())

    return behave


def close(connection: socket.socket, call: Call) -> None:
    """Close the connection without an answer."""


def say(*pieces: bytes) -> Behaviour:
    """Send these bytes, then wait until the other side closes the connection."""

    def behave(connection: socket.socket, call: Call) -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
            while connection.recv(65536):
                pass

    return behave


class Receiver:
    """Answers 200 unless `will` was called. `calls`: the received requests in order."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._tls = tls
        self._behaviours: queue.SimpleQueue[Behaviour] = queue.SimpleQueue()
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def will(self, *behaviours: Behaviour) -> None:
        for behaviour in behaviours:
            self._behaviours.put(behaviour)

    def next(self) -> Call:
        return self.calls.get(timeout=60)

    def close(self) -> None:
        # Closing alone does not wake the accepting thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if self._tls:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
            call = _read(connection)
            try:
                behaviour = self._behaviours.get_nowait()
            except queue.Empty:
                behaviour = answer(200)
            self.calls.put(call)
            behaviour(connection, call)


def _read(connection: socket.socket) -> Call:
    with connection.makefile("rb") as stream:
        line = stream.readline().decode("latin1").strip()
        headers = {}
        while field := stream.readline().decode("latin1").strip():
            name, _, value = field.partition(": ")
            headers[name.lower()] = value
        return Call(line, headers, stream.read(int(headers.get("content-length", "0"))))


@contextlib.contextmanager
def receiving(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver = Receiver(tls)
    try:
        yield receiver
    finally:
        receiver.close()
