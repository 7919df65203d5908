"""A task and its log, read in pages, are of one moment, whatever is written, lost or expires in between."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import claim_one, publish, settle, submit, tokens
from tokenmill.protocol import keys, log
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "PAGE", 3)


class Meddled:
    """A client that calls something before its `nth` read of a log."""

    def __init__(self, client: RedisClient, nth: int, happen: Callable[[], object]) -> None:
        self._client = client
        self._left = nth
        self._happen = happen
        self.pages: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def xrange(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self._happen()
        rows: Any = self._client.xrange(*args, **options)
        self.pages.append(len(rows))
        return rows


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6, 7])
def test_a_log_is_read_page_by_page(redis_client: RedisClient, claimed: Claimed, count: int) -> None:
    client = Meddled(redis_client, 0, lambda: None)
    store = TaskStore(client)
    publish(store, claimed, 0, count)
    reading = store.read(claimed.task_id)
    assert reading is not None
    assert reading.entries == tokens(0, count)
    assert max(client.pages, default=0) <= 3
    assert [event.seq for event in store.read_log(claimed.task_id)] == list(range(count))
    assert [event.seq for event in store.read_log(claimed.task_id, 1)] == list(range(2, count))


def test_entries_written_meanwhile_are_not_included(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 5)
    client = Meddled(redis_client, 2, lambda: settle(store, claimed, 5, 2))
    reading = TaskStore(client).read(claimed.task_id)
    assert reading is not None
    assert reading.snapshot.status == "queued"
    assert reading.entries == tokens(0, 5)


def test_a_task_that_expires_meanwhile_is_unknown(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    """romm#3195: an expired result was a 500."""
    settle(store, claimed, 0, 5)
    gone = [keys.run(claimed.task_id), keys.log(claimed.task_id)]
    client = Meddled(redis_client, 2, lambda: redis_client.delete(*gone))
    assert TaskStore(client).read(claimed.task_id) is None


def test_a_log_that_lost_its_end_meanwhile_is_read_again(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 5)
    lost = [f"0-{seq + 1}" for seq in (3, 4)]
    client = Meddled(redis_client, 2, lambda: redis_client.xdel(keys.log(claimed.task_id), *lost))
    reading = TaskStore(client).read(claimed.task_id)
    assert reading is not None
    assert reading.snapshot.num_entries == 3
    assert reading.entries == tokens(0, 3)


def test_a_claim_has_the_length_of_the_log(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    first = claim_one(store)
    publish(store, first, 0, 4)
    store.hand_back({first.task_id: first.owner})
    (again,) = store.claim(first.queue.split(":")[1], worker="w", max_tasks=1, lease_seconds=60)
    assert (again.num_entries, again.entries) == (4, ())
    assert store.log_entries(again.task_id, 4) == tokens(0, 4)
    assert store.log_entries(again.task_id, 2) == tokens(0, 2)
    # It was cancelled meanwhile; that end is not part of the claim.
    store.cancel(again.task_id)
    assert store.log_entries(again.task_id, 4) == tokens(0, 4)
    assert isinstance(store.read_log(again.task_id)[-1], FinishedEvent)
