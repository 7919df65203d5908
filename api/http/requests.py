"""Parses HTTP/1 requests more strictly than Waitress, with a separate error for each fault.

Invariants: a request is passed on only when it is complete and within all limits. Requests that two parsers
could frame differently (request smuggling, RFC 9112 section 11.2) are refused. Error messages do not repeat
the input.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from waitress.adjustments import Adjustments
from waitress.parser import HTTPRequestParser, crack_first_line
from waitress.receiver import ChunkedReceiver

from api.http.uploads import UploadBuffer, Uploads, is_upload, storage_full
from api.problems import Problem

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024
"""Limit on the request line, which contains the URL."""
MAX_HEADERS = 100
MAX_TRAILER_BYTES = 16 * 1024
MAX_CHUNK_LINE_BYTES = 1024
FRAMING_FACTOR = 8
"""A chunked body may take this many times its size on the wire. One-byte chunks take six times."""

_HOST = re.compile(r"[A-Za-z0-9._~%!$&'()*+;=:\[\]-]*")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}")
_METHOD_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~")
_ERRORS: Mapping[int, tuple[str, str]] = {
    400: ("bad_request", "the request is not valid HTTP/1.1"),
    501: ("not_implemented", "the only supported Transfer-Encoding of a request is `chunked`"),
}
_NO_VERSION = "this port speaks HTTP/1.1 and HTTP/1.0, without TLS"


class RequestParser(HTTPRequestParser):  # type: ignore[misc]  # Waitress ships no types
    """Parses one request. `error` is None or a `Problem`.

    `adj.max_request_body_size` is the smallest size that is refused. It counts the body without the framing
    of its chunks. `adj.uploads`, if it is set, has another limit for uploads, whose bodies are kept on disk.
    """

    error: Problem | None
    command = ""
    request_uri = ""
    path = ""

    def __init__(self, adj: Adjustments) -> None:
        super().__init__(adj)
        self.adj: Adjustments = adj
        self.wire_bytes = 0

    @property
    def has_begun(self) -> bool:
        """Whether a part of a request has arrived."""
        return bool(self.header_plus.strip(b"\r\n")) or self.headers_finished

    @property
    def buffered_bytes(self) -> int:
        if self.body_rcv is None:
            return len(self.header_plus)
        body = self.body_rcv.getbuf()
        return len(self.header_plus) + (body.memory_bytes if isinstance(body, UploadBuffer) else len(body))

    def received(self, data: bytes) -> int:
        """Consume the bytes of this request and return their number."""
        if self.completed:
            return 0
        try:
            return self._receive_head(data) if self.body_rcv is None else self._receive_body(data)
        except Problem as error:
            self.fail(error)
        except OSError as error:
            self.fail(storage_full(error))
        except ValueError:
            # For example the URL `http://[`, or a number of thousands of digits.
            self.fail(Problem(400, "bad_request", "the URL or a header of the request is not valid"))
        return len(data)

    def fail(self, error: Problem) -> None:
        """End the request with an error. What follows on its connection cannot be parsed."""
        self.error = error
        self.completed = True
        self.expect_continue = False
        self.version = "1.1"

    def _receive_head(self, data: bytes) -> int:
        _check_begin((self.header_plus + data)[: MAX_LINE_BYTES + 2].lstrip(b"\r\n"))
        taken: int = super().received(data)
        if self.error is not None:
            raise _translated(self.error)
        if self.headers_finished and self.body_rcv is None:
            # There is no body to wait for.
            self.expect_continue = False
        return taken

    def parse_header(self, header_plus: bytes) -> None:
        """Called by the base class with a complete head. Raises `Problem`."""
        if header_plus.count(b"\r\n") > MAX_HEADERS + 2:
            raise Problem(431, "too_many_headers", f"a request may have at most {MAX_HEADERS} headers")
        super().parse_header(header_plus)
        _check_version(self.version)
        _check_framing(self.version, header_plus, self.headers, chunked=self.chunked)
        _check_host(self.version, self.headers.get("HOST"))
        expected = self.headers.get("EXPECT", "").lower()
        if self.version == "1.1" and expected not in ("", "100-continue"):
            raise Problem(417, "expectation_failed", "the only supported Expect is 100-continue")
        self._prepare_upload()
        if self.content_length >= self.adj.max_request_body_size:
            raise self._too_large()

    def _prepare_upload(self) -> None:
        """Keep the body of an upload on disk. Raises `Problem`."""
        uploads: Uploads | None = getattr(self.adj, "uploads", None)
        if uploads is None or not is_upload(self.command, self.path, self.headers):
            return
        uploads.check(self.headers)
        # Of this request alone: Waitress compares with it too.
        self.adj = copy.copy(self.adj)
        self.adj.max_request_body_size = uploads.refused_from
        if self.body_rcv is not None:
            self.body_rcv.buf = uploads.new_buffer()

    def _receive_body(self, data: bytes) -> int:
        receiver = self.body_rcv
        taken: int = receiver.received(data)
        self.wire_bytes += taken
        if receiver.error:
            raise Problem(400, "bad_chunk", "the chunked encoding of the body is not valid")
        if isinstance(receiver, ChunkedReceiver):
            self._check_chunks(receiver)
        if receiver.completed:
            self.completed = True
            # The application sees the length of a chunked body too.
            self.headers["CONTENT_LENGTH"] = str(len(receiver))
        return taken

    def _check_chunks(self, receiver: ChunkedReceiver) -> None:
        limit = self.adj.max_request_body_size
        if len(receiver) + receiver.chunk_remainder >= limit or self.wire_bytes > FRAMING_FACTOR * limit:
            raise self._too_large()
        if len(receiver.control_line) > MAX_CHUNK_LINE_BYTES:
            raise Problem(400, "bad_chunk", "the size line of a chunk is too long")
        if len(receiver.trailer) > MAX_TRAILER_BYTES:
            raise Problem(431, "head_too_large", "the trailers of the body are too long")

    def _too_large(self) -> Problem:
        limit = self.adj.max_request_body_size - 1
        return Problem(413, "body_too_large", f"the body may have at most {limit} bytes", param="body")


def _check_begin(begin: bytes) -> None:
    """Refuse input that cannot become a request, by the first bytes of its head."""
    line, end, _ = begin.partition(b"\n")
    if begin and begin[0] not in _METHOD_BYTES:
        raise Problem(400, "bad_request", f"the request is not HTTP; {_NO_VERSION}")
    if len(line) > MAX_LINE_BYTES:
        raise Problem(414, "url_too_long", f"a request line may have at most {MAX_LINE_BYTES} bytes")
    if end and not line.endswith(b"\r"):
        raise Problem(400, "bad_request", "lines must end with CR LF")
    if not end:
        return
    method, _, version = crack_first_line(line[:-1].rstrip()) if _is_upper(line) else (b"", b"", b"")
    if not method:
        raise Problem(400, "bad_request", "the request line is not valid")
    _check_version(version.decode("latin-1"))


def _is_upper(line: bytes) -> bool:
    method = line.partition(b" ")[0]
    return method == method.upper()


def _check_version(version: str) -> None:
    if version not in ("1.1", "1.0"):
        raise Problem(505, "http_version_not_supported", _NO_VERSION)


def _check_framing(version: str, head: bytes, headers: Mapping[str, Any], *, chunked: bool) -> None:
    """Refuse a request if parsers could disagree on where its body ends."""
    length = headers.get("CONTENT_LENGTH")
    encodings = len(re.findall(rb"(?im)^transfer-encoding[ \t]*:", head))
    if encodings and version == "1.0":
        raise Problem(400, "bad_framing", "HTTP/1.0 has no Transfer-Encoding")
    if encodings > 1 or (encodings and not chunked):
        raise Problem(400, "bad_framing", "the only supported Transfer-Encoding is a single `chunked`")
    if encodings and length is not None:
        raise Problem(400, "bad_framing", "send either Content-Length or Transfer-Encoding, not both")
    if length is not None and not _CONTENT_LENGTH.fullmatch(length):
        raise Problem(400, "bad_framing", "Content-Length must be a single integer")


def _check_host(version: str, host: str | None) -> None:
    if host is None and version == "1.1":
        raise Problem(400, "missing_host", "HTTP/1.1 requires a Host header")
    if host is not None and not _HOST.fullmatch(host):
        raise Problem(400, "bad_host", "Host must be one host name or address, with an optional port")


def _translated(error: Any) -> Problem:
    """Replace Waitress's own errors: their messages contain input and class names."""
    if isinstance(error, Problem):
        return error
    if error.code == 431:
        return Problem(431, "head_too_large", f"a request head may have at most {MAX_HEAD_BYTES} bytes")
    status = error.code if error.code in _ERRORS else 400
    return Problem(status, *_ERRORS[status])
