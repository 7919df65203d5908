"""Whether the client of a call is still there, and how many calls may wait."""

import contextlib

import pytest

from api.streams.presence import Places, client_is_gone


@pytest.mark.parametrize("gone", [False, True])
def test_the_server_is_asked(gone):
    assert client_is_gone({"waitress.client_disconnected": lambda: gone}) is gone


def test_where_nothing_is_shown_the_client_is_taken_to_be_there():
    assert not client_is_gone({})


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
