"""The collector rests while libraries are imported, and leaves them alone afterwards."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from worker.importing import uncollected


class Knot:
    """In a cycle of its own, which only the collector frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    assert gc.isenabled()


def test_the_collector_rests_within_and_goes_on_afterwards() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_when_an_import_fails() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_what_was_imported_is_not_looked_at_again_and_what_comes_later_is() -> None:
    with uncollected():
        early = weakref.ref(Knot())
    late = weakref.ref(Knot())
    gc.collect()
    assert early() is not None
    assert late() is None
