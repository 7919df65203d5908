"""One POST to a real socket: the address it connects to, and its limits against any server."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.schemas.webhook_url import parse_url
from api.webhooks import http_post
from api.webhooks.http_post import Poster, PostFailed
from tests.api.webhooks.receiver import Receiver, answer, close, receiving, say

PATIENCE = 0.3
"""Time limit of a POST in tests that wait for it."""


@pytest.fixture
def receiver() -> Iterator[Any]:
    with receiving() as receiver:
        yield receiver


def names(**addresses: Any) -> Any:
    """A fake `getaddrinfo`, and the list of names that it was called with."""
    asked = []

    def resolve(host: str, port: Any, *, type: Any) -> Any:
        asked.append(host)
        found = addresses[host.partition(".")[0]]
        if isinstance(found, Exception):
            raise found
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in one], type, 6, "", (one, port)) for one in found.split()]

    return resolve, asked


def post(url: str, body: Any = b"{}", **options: Any) -> Any:
    options.setdefault("allow_private", True)
    poster, target = Poster(**options), parse_url(url)
    return poster.post(target, {"Content-Type": "application/json"}, body, poster.addresses(target))


def test_the_body_is_sent_and_the_status_returned(receiver: Receiver) -> None:
    receiver.will(answer(204))
    assert post(receiver.url("/a/b?c=d"), "\u00e4".encode() * 100_000) == 204
    call = receiver.next()
    assert call.line == "POST /a/b?c=d HTTP/1.1"
    assert call.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert call.headers["content-type"] == "application/json"
    assert call.body == "\u00e4".encode() * 100_000


@pytest.mark.parametrize("status", [200, 299, 301, 302, 307, 308, 400, 410, 429, 500, 503])
def test_redirects_are_not_followed(receiver: Receiver, status: int) -> None:
    """The target's address has not been checked."""
    receiver.will(answer(status, f"Location: {receiver.url('/elsewhere')}"))
    assert post(receiver.url()) == status
    assert receiver.next().line.startswith("POST /hook ")
    assert receiver.calls.empty()


def test_no_proxy_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve names itself."""
    with receiving() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url("/"))
        assert post(receiver.url()) == 200
        assert proxy.calls.empty()


class TestAddresses:
    def test_a_private_address_is_refused(self, receiver: Receiver) -> None:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            with pytest.raises(PostFailed, match="is not a public address"):
                post(receiver.url(host=host), allow_private=False)
        assert receiver.calls.empty()

    @pytest.mark.parametrize("addresses", ["127.0.0.1 8.8.8.8", "8.8.8.8 127.0.0.1", "2606:4700::1 ::1"])
    def test_one_private_address_refuses_the_name(self, receiver: Receiver, addresses: Any) -> None:
        """It could be called when the public one does not answer."""
        resolve, _ = names(hook=addresses)
        with pytest.raises(PostFailed, match="is not a public address"):
            post(receiver.url(host="hook.example"), allow_private=False, resolve=resolve)
        assert receiver.calls.empty()

    def test_the_name_is_resolved_once(self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        """DNS rebinding: a name that is public when checked and private when called."""
        answers = ["8.8.8.8", "127.0.0.1"]
        asked = []

        def rebind(host: str, port: Any, *, type: Any) -> Any:
            asked.append(host)
            return [(socket.AF_INET, type, 6, "", (answers.pop(0), port))]

        called: list[tuple[str, int]] = []

        def connect(address: tuple[str, int], timeout: float) -> None:
            called.append(address)
            raise OSError("not here")

        monkeypatch.setattr(socket, "create_connection", connect)
        with pytest.raises(PostFailed, match="not here"):
            post(receiver.url(host="hook.example"), allow_private=False, resolve=rebind)
        assert asked == ["hook.example"]
        assert called == [("8.8.8.8", receiver.port)]

    def test_the_host_header_has_the_name(self, receiver: Receiver) -> None:
        resolve, asked = names(hook="127.0.0.1")
        assert post(receiver.url(host="hook.example"), resolve=resolve) == 200
        assert asked == ["hook.example"]
        assert receiver.next().headers["host"] == f"hook.example:{receiver.port}"

    def test_the_next_address_is_tried(self, receiver: Receiver) -> None:
        resolve, _ = names(hook="127.0.0.2 127.0.0.1")
        assert post(receiver.url(host="hook.example"), resolve=resolve) == 200

    @pytest.mark.parametrize(
        "found", ["", socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")]
    )
    def test_a_name_that_does_not_resolve(self, receiver: Receiver, found: Any) -> None:
        resolve, _ = names(hook=found)
        with pytest.raises(PostFailed, match=r"name|label"):
            post(receiver.url(host="hook.example"), resolve=resolve)


class TestEnds:
    """Whatever the server does, the call ends within the limit and raises only `PostFailed`."""

    @pytest.mark.parametrize(
        "behaviour",
        [
            close,
            say(),
            say(b"HTTP/1.1 200"),
            say(b"HTTP/1.1 200 OK\r\nA: b\r\n"),
            say(b"\x00\xff" * 100 + b"\r\n"),
            say(b"SSH-2.0-OpenSSH_9.2\r\n"),
            say(b"HTTP/1.1 9999 X\r\n\r\n"),
            say(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200_000),
            say(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 1_000_000),
            say(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 100_000),
        ],
        ids=["close", "silent", "half", "no-end", "bytes", "ssh", "status", "heads", "head", "continues"],
    )
    def test_no_answer_is_a_failure(self, receiver: Receiver, behaviour: Any) -> None:
        receiver.will(behaviour)
        with pytest.raises(PostFailed):
            post(receiver.url(), seconds=PATIENCE)
        receiver.next()
        assert receiver.calls.empty()

    def test_a_trickled_response_does_not_exceed_the_limit(self, receiver: Receiver) -> None:
        """Each byte arrives in time; all of them do not."""
        over = threading.Event()

        def drip(connection: socket.socket, call: Any) -> None:
            while not over.wait(0.01):
                connection.sendall(b"H")

        receiver.will(drip)
        began = time.monotonic()
        with pytest.raises(PostFailed):
            post(receiver.url(), seconds=PATIENCE)
        over.set()
        assert time.monotonic() - began < 60

    def test_a_body_that_is_not_read_does_not_exceed_the_limit(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(PostFailed, match="timed out"):
            post(f"http://127.0.0.1:{deaf.getsockname()[1]}/", b"x" * 50_000_000, seconds=PATIENCE)

    @pytest.mark.parametrize(
        "rest",
        [
            [b"Content-Length: 100\r\n\r\n"],
            [b"Content-Length: 100000000\r\n\r\n"] + [b"x" * 1_000_000] * 100,
            [b"Transfer-Encoding: chunked\r\n\r\nzz"],
            [b"\r\n", b"no length, and no end"],
        ],
        ids=["too-short", "huge", "broken", "endless"],
    )
    def test_the_status_counts_whatever_follows(
        self, receiver: Receiver, rest: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_post, "DISCARD_SECONDS", 0.1)
        receiver.will(say(b"HTTP/1.1 201 Created\r\n", *rest))
        assert post(receiver.url()) == 201

    def test_a_refused_connection(self) -> None:
        with receiving() as receiver:
            url = receiver.url()
        with pytest.raises(PostFailed, match="refused"):
            post(url)

    def test_errors_do_not_contain_the_url(self, receiver: Receiver) -> None:
        receiver.will(close)
        with pytest.raises(PostFailed) as raised:
            post(receiver.url("/secret-path?token=secret"))
        assert "secret" not in str(raised.value)


#: Key and self-signed certificate of hook.example, valid for a hundred years. Not a secret.
CERTIFICATE = Path(__file__).parent / "hook_example.pem"


class TestTls:
    @pytest.fixture
    def asked(self) -> Any:
        """The server names that clients sent (SNI)."""
        return []

    @pytest.fixture
    def secure(self, asked: Any) -> Iterator[Any]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        context.sni_callback = lambda _, name, __: asked.append(name)
        with receiving(context) as receiver:
            yield receiver

    @pytest.fixture
    def trusting(self) -> Any:
        return ssl.create_default_context(cafile=CERTIFICATE)

    def test_the_certificate_must_be_for_the_name(self, secure: Any, asked: Any, trusting: Any) -> None:
        resolve, _ = names(hook="127.0.0.1", other="127.0.0.1")
        url = secure.url(host="hook.example").replace("http:", "https:")
        assert post(url, b"x" * 100_000, resolve=resolve, tls=trusting) == 200
        call = secure.next()
        assert (call.headers["host"], len(call.body)) == (f"hook.example:{secure.port}", 100_000)
        with pytest.raises(PostFailed, match="certificate"):
            post(url.replace("hook.", "other."), resolve=resolve, tls=trusting)
        assert asked == ["hook.example", "other.example"]
        assert secure.calls.empty()

    def test_an_untrusted_certificate(self, secure: Any) -> None:
        resolve, _ = names(hook="127.0.0.1")
        with pytest.raises(PostFailed, match="certificate"):
            post(secure.url(host="hook.example").replace("http:", "https:"), resolve=resolve)
        assert secure.calls.empty()

    def test_a_server_without_tls(self, receiver: Receiver, trusting: Any) -> None:
        with pytest.raises(PostFailed):
            post(receiver.url().replace("http:", "https:"), tls=trusting, seconds=5)

    def test_a_silent_server(self, trusting: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(PostFailed, match="timed out"):
            post(f"https://127.0.0.1:{deaf.getsockname()[1]}/", tls=trusting, seconds=PATIENCE)
