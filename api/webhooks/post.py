"""One HTTP POST to a place that somebody else has named, and the status that came back.

Law: the address that is connected to is the one that was checked; nothing is looked up twice, so no name can
change its meaning in between. No redirect is followed, no proxy asked, and all of it ends in time and in a
bounded number of bytes, whatever the other side does. Knows no task.
"""

import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api.schemas.webhook_url import Target, is_public

POST_SECONDS = 15.0
"""From the connection to the end of the answer; looking up the name has limits of its own."""
CONNECT_SECONDS = 5.0
DISCARD_SECONDS = 1.0
"""The status is all that is asked for. A server that is cut off in what follows would count an error."""
MAX_ANSWER_BYTES = 64 * 1024
_CHUNK = 16 * 1024

Resolve = Callable[..., list[Any]]
"""`socket.getaddrinfo`."""


class PostFailed(Exception):
    """No status came back; the message says why, and does not repeat the URL, which may hold a secret."""


class Poster:
    """POSTs for any number of threads. `allow_private`: any address may be called.

    `tls`: certificates are checked as it says; by default against those that the system trusts.
    """

    def __init__(
        self,
        *,
        allow_private: bool,
        seconds: float = POST_SECONDS,
        resolve: Resolve = socket.getaddrinfo,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._seconds = seconds
        self._resolve = resolve
        self._tls = tls or ssl.create_default_context()

    def post(
        self,
        target: Target,
        headers: Mapping[str, str],
        body: bytes,
        addresses: Sequence[str] | None = None,
    ) -> int:
        """The status of the answer. `addresses`: those of `target` as `addresses` returned them; None looks
        them up. Raises `PostFailed`.
        """
        if addresses is None:
            addresses = self.addresses(target)
        deadline = time.monotonic() + self._seconds
        try:
            with self._connect(target, addresses, deadline) as connection:
                _send(connection, deadline, _request(target, headers, body))
                return _status(connection, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise PostFailed(_reason(error)) from error

    def addresses(self, target: Target) -> list[str]:
        """Those that the name resolves to. Raises `PostFailed`, also if one must not be called."""
        try:
            found = self._resolve(target.host, target.port, type=socket.SOCK_STREAM)
        # UnicodeError: of a name that cannot be one.
        except (OSError, UnicodeError) as error:
            raise PostFailed(f"the name cannot be looked up: {_reason(error)}") from error
        addresses = [str(address[0]) for *_, address in found]
        for address in addresses:
            if not self._allow_private and not is_public(address):
                raise PostFailed(f"{address} is not a public address")
        return addresses

    def _connect(self, target: Target, addresses: Sequence[str], deadline: float) -> socket.socket:
        connection = _first_that_answers(addresses, target.port, deadline)
        if not target.secure:
            return connection
        connection.settimeout(_left(deadline))
        try:
            # The name, not the address: the certificate has to be for it.
            return self._tls.wrap_socket(connection, server_hostname=target.host)
        except BaseException:
            connection.close()
            raise


def _first_that_answers(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    failed: OSError = OSError("the name stands for no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), min(CONNECT_SECONDS, _left(deadline)))
        except OSError as error:
            failed = error
    raise failed


def _request(target: Target, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = {"Host": target.authority, "Connection": "close", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {target.path} HTTP/1.1\r\n{head}\r\n".encode("ascii") + body


def _send(connection: socket.socket, deadline: float, request: bytes) -> None:
    # In pieces: one call for all would take its time anew for each of them.
    rest = memoryview(request)
    while rest:
        connection.settimeout(_left(deadline))
        rest = rest[connection.send(rest[:_CHUNK]) :]


def _status(connection: socket.socket, deadline: float) -> int:
    answer = _Answer(connection, deadline)
    response = http.client.HTTPResponse(answer, method="POST")  # type: ignore[arg-type]  # asked for `makefile` alone
    with contextlib.closing(response):
        response.begin()
        answer.deadline = min(deadline, time.monotonic() + DISCARD_SECONDS)
        with contextlib.suppress(OSError, http.client.HTTPException):
            while response.read(_CHUNK):
                pass
        return response.status


class _Answer(io.RawIOBase):
    """What a connection brings until the deadline, and no more than is sensible."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self.deadline = deadline
        self._num_bytes = 0

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self.deadline))
        count = self._connection.recv_into(buffer)
        self._num_bytes += count
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise OSError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        return count


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")  # in the words of a socket that notices it first
    return left


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
