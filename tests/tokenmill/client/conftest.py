"""Fixtures: clients of a scripted service or of any address, synchronous and for asyncio."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.tokenmill.cli.fake_service import FakeService
from tests.tokenmill.client.either_client import BlockingClient, Clock, sync_client


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Callable[..., Any]]:
    """Creates a client, sync and async in turn, which is closed after the test.

    `timed`: by the test's clock instead of the real one.
    """
    create: Any = sync_client if request.param == "sync" else BlockingClient
    with ExitStack() as stack:

        def start(*arguments: Any, timed: bool = True, **options: Any) -> Any:
            return stack.enter_context(create(clock if timed else None, *arguments, **options))

        yield start


@pytest.fixture
def client(service: FakeService, connect: Callable[..., Any]) -> Any:
    return connect(service.url)
