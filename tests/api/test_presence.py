"""What a connection shows of its client, on real sockets."""

import contextlib
import socket

import pytest

from api import json_body
from api.presence import Places, client_is_gone


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("name", ["gunicorn.socket", "werkzeug.socket"])
def test_a_closed_connection_is_seen(pair, name):
    ours, theirs = pair
    assert not client_is_gone({name: ours})
    theirs.close()
    assert client_is_gone({name: ours})
    assert client_is_gone({name: ours})


def test_asking_takes_nothing(pair):
    ours, theirs = pair
    theirs.sendall(b"GET")
    assert not client_is_gone({"gunicorn.socket": ours})
    assert ours.recv(10) == b"GET"
    assert ours.gettimeout() is None


def test_a_closed_socket_of_ours_counts_as_gone(pair):
    pair[0].close()
    assert client_is_gone({"gunicorn.socket": pair[0]})


@pytest.mark.parametrize("environ", [{}, {"gunicorn.socket": None}, {"gunicorn.socket": "x"}])
def test_where_nothing_is_shown_the_client_is_taken_to_be_there(environ):
    assert not client_is_gone(environ)


def test_a_body_that_stops_coming_is_not_waited_for(client, pair, monkeypatch):
    """Otherwise a few hundred idle connections hold every thread."""
    monkeypatch.setattr(json_body, "BODY_SILENCE_SECONDS", 0.05)
    ours, theirs = pair
    theirs.sendall(b'{"prompt": ')
    with ours.makefile("rb", buffering=0) as stream:
        reply = client.post(
            "/v1/tasks",
            content_type="application/json",
            environ_overrides={"gunicorn.socket": ours, "wsgi.input": stream, "CONTENT_LENGTH": "100"},
        )
    assert (reply.status_code, reply.json["error"]["code"]) == (408, "body_timeout")
    assert ours.gettimeout() is None


def test_places_are_given_back():
    places = Places(2)
    with places.take() as first, places.take() as second, places.take() as third:
        assert (first, second, third) == (True, True, False)
    with places.take() as again:
        assert again


def test_a_tenant_has_as_many_places_as_it_leaves_free():
    places = Places(8, is_shared=True)
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(places.take("a")) for _ in range(8)]
        assert taken == [True] * 4 + [False] * 4
        assert [stack.enter_context(places.take("b")) for _ in range(3)] == [True, True, False]
        # Each that comes finds one, as long as fewer tenants than places are there.
        assert stack.enter_context(places.take("c"))
    with places.take("a") as again:
        assert again
    assert not places._taken


def test_a_lone_tenant_has_all_places():
    places = Places(3)
    with contextlib.ExitStack() as stack:
        assert [stack.enter_context(places.take("a")) for _ in range(4)] == [True] * 3 + [False]
