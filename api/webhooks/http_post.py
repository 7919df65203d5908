"""Sends one HTTP POST to a URL that a user supplied, and returns the status of the response.

Invariants: the address that was checked is the one that is connected to; no name is resolved twice, so DNS
rebinding cannot change it. No redirect is followed and no proxy used. The whole exchange is bounded in time
and bytes, whatever the other side does.
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
"""Limit from the connection to the end of the response. The resolver has time limits of its own."""
CONNECT_SECONDS = 5.0
DISCARD_SECONDS = 1.0
"""Only the status is needed. The body is read for this long: some servers log an error if it is cut off."""
MAX_RESPONSE_BYTES = 64 * 1024
_CHUNK = 16 * 1024

Resolve = Callable[..., list[Any]]
"""`socket.getaddrinfo`."""


class PostFailed(Exception):
    """No status was received. The message says why and does not contain the URL, which may hold a secret."""


class Poster:
    """Sends POSTs for any number of threads.

    `allow_private`: permit addresses that are not public. `tls`: how certificates are checked; by default
    against those that the system trusts.
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

    def post(self, target: Target, headers: Mapping[str, str], body: bytes, addresses: Sequence[str]) -> int:
        """Return the status of the response. Raises `PostFailed`.

        `addresses`: the result of `addresses(target)`.
        """
        deadline = time.monotonic() + self._seconds
        try:
            with self._connect(target, addresses, deadline) as connection:
                _send(connection, deadline, _request(target, headers, body))
                return _status(connection, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise PostFailed(_reason(error)) from error

    def addresses(self, target: Target) -> list[str]:
        """Resolve the name. Raises `PostFailed` if that fails or if one of its addresses is not permitted."""
        try:
            found = self._resolve(target.host, target.port, type=socket.SOCK_STREAM)
        # UnicodeError: the name cannot be encoded.
        except (OSError, UnicodeError) as error:
            raise PostFailed(f"cannot resolve the name: {_reason(error)}") from error
        addresses = [str(address[0]) for *_, address in found]
        for address in addresses:
            if not self._allow_private and not is_public(address):
                raise PostFailed(f"{address} is not a public address")
        return addresses

    def _connect(self, target: Target, addresses: Sequence[str], deadline: float) -> socket.socket:
        connection = _connect_to_first(addresses, target.port, deadline)
        if not target.secure:
            return connection
        connection.settimeout(_left(deadline))
        try:
            # The certificate must be for the name, not for the address.
            return self._tls.wrap_socket(connection, server_hostname=target.host)
        except BaseException:
            connection.close()
            raise


def _connect_to_first(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    """Connect to the first address that accepts."""
    failed: OSError = OSError("the name has no address")
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
    # In chunks: the timeout of a socket restarts with every piece that `sendall` sends.
    rest = memoryview(request)
    while rest:
        connection.settimeout(_left(deadline))
        rest = rest[connection.send(rest[:_CHUNK]) :]


def _status(connection: socket.socket, deadline: float) -> int:
    stream = _ResponseStream(connection, deadline)
    response = http.client.HTTPResponse(stream, method="POST")  # type: ignore[arg-type]  # it calls only `makefile`
    with contextlib.closing(response):
        response.begin()
        stream.deadline = min(deadline, time.monotonic() + DISCARD_SECONDS)
        with contextlib.suppress(OSError, http.client.HTTPException):
            while response.read(_CHUNK):
                pass
        return response.status


class _ResponseStream(io.RawIOBase):
    """Reads from a connection until the deadline, and at most `MAX_RESPONSE_BYTES`."""

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
        if self._num_bytes > MAX_RESPONSE_BYTES:
            raise OSError(f"the response has more than {MAX_RESPONSE_BYTES} bytes")
        return count


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")  # as the socket module words it
    return left


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
