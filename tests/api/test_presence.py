"""Whether the client of a call is still there, and how many calls may wait."""

import pytest

from api.presence import Places, client_is_gone


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
