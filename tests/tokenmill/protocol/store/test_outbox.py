"""Webhooks in Redis: added by every end, taken by one deliverer at a time, removed when done."""

from collections.abc import Callable

import pytest
import redis

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    claim,
    claim_one,
    dump,
    fetch,
    final_write,
    publish,
    reap,
    settle,
    snapshot_of,
    submit,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.snapshots import WebhookDelivery
from tokenmill.protocol.store.outbox import Attempt, Outbox, Undelivered
from tokenmill.protocol.store.task_store import TaskStore

URL = "https://example.org/hook?a=1"
SENT, FAILED = Attempt(200), Attempt(503, "status 503")
PATIENCE = 3600.0
"""No deliverer of these tests is idle for this long."""


@pytest.fixture
def outbox(redis_client: RedisClient) -> Outbox:
    return Outbox(redis_client)


def take(outbox: Outbox, max_webhooks: int = 10, silence_seconds: float = PATIENCE) -> list[Undelivered]:
    return outbox.take(max_webhooks, silence_seconds=silence_seconds)


def pass_time(client: RedisClient, seconds: float) -> None:
    """Make each webhook that waits for its retry this much older."""
    for member, _ in client.zrange(keys.OUTBOX_DUE, 0, -1, withscores=True):
        client.zincrby(keys.OUTBOX_DUE, -seconds, member)


def ended(store: TaskStore, client: RedisClient, **changes: object) -> str:
    """An ended task with a webhook."""
    task_id = submit(store, client, webhook=URL, **changes)
    settle(store, claim_one(store), 0, 2)
    return task_id


def by_settlement(store: TaskStore, client: RedisClient, task_id: str) -> None:
    settle(store, claim_one(store))


def by_failure(store: TaskStore, client: RedisClient, task_id: str) -> None:
    settle(store, claim_one(store), reason="error")


def by_cancel(store: TaskStore, client: RedisClient, task_id: str) -> None:
    store.cancel(task_id)


def by_cancel_of_a_running_one(store: TaskStore, client: RedisClient, task_id: str) -> None:
    claim_one(store)
    store.cancel(task_id)


def by_waiting_too_long(store: TaskStore, client: RedisClient, task_id: str) -> None:
    assert reap(store, max_task_seconds=-1).timed_out == (task_id,)


def by_rqs_tools_at_the_claim(store: TaskStore, client: RedisClient, task_id: str) -> None:
    fetch(client, task_id).cancel()
    assert claim(store) == []


def by_rqs_tools_at_the_settlement(store: TaskStore, client: RedisClient, task_id: str) -> None:
    claimed = claim_one(store)
    fetch(client, task_id).delete()
    settle(store, claimed)


def by_rqs_tools_at_the_renewal(store: TaskStore, client: RedisClient, task_id: str) -> None:
    claimed = claim_one(store)
    fetch(client, task_id).delete()
    store.renew({task_id: claimed.owner}, 60)


def by_rqs_tools_at_the_hand_back(store: TaskStore, client: RedisClient, task_id: str) -> None:
    claimed = claim_one(store)
    fetch(client, task_id).delete()
    store.hand_back({task_id: claimed.owner})


ENDS = [
    by_settlement,
    by_failure,
    by_cancel,
    by_cancel_of_a_running_one,
    by_waiting_too_long,
    by_rqs_tools_at_the_claim,
    by_rqs_tools_at_the_settlement,
    by_rqs_tools_at_the_renewal,
    by_rqs_tools_at_the_hand_back,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_every_end_adds_the_webhook(
    store: TaskStore,
    outbox: Outbox,
    redis_client: RedisClient,
    end: Callable[[TaskStore, RedisClient, str], None],
) -> None:
    task_id = submit(store, redis_client, webhook=URL)
    assert take(outbox) == []
    end(store, redis_client, task_id)
    (webhook,) = take(outbox)
    assert (webhook.task_id, webhook.url, webhook.tries) == (task_id, URL, 0)
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    assert snapshot.finished_at is not None
    assert take(outbox) == []


def test_a_task_without_a_webhook_adds_nothing(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    settle(store, claim_one(store))
    assert not redis_client.exists(keys.OUTBOX)


def test_an_end_that_is_sent_twice_adds_one_webhook(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    """The reply of the settlement was lost, and it is sent again; then the task is cancelled."""
    task_id = submit(store, redis_client, webhook=URL)
    claimed = claim_one(store)
    for _ in range(2):
        store.publish([final_write(claimed, 0, 1)])
    store.cancel(task_id)
    assert len(take(outbox)) == 1


def test_the_webhook_is_not_added_before_the_result_is_stored(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    submit(store, redis_client, webhook=URL)
    claimed = claim_one(store)
    publish(store, claimed, 0, 2)
    assert take(outbox) == []
    settle(store, claimed, 2)
    assert fetch(redis_client, claimed.task_id).return_value() is not None
    assert len(take(outbox)) == 1


def test_a_done_webhook_leaves_nothing(store: TaskStore, outbox: Outbox, redis_client: RedisClient) -> None:
    ended(store, redis_client)
    (webhook,) = take(outbox)
    outbox.done(webhook, SENT)
    assert redis_client.xlen(keys.OUTBOX) == 0
    assert redis_client.xpending(keys.OUTBOX, "deliverers")["pending"] == 0
    assert take(outbox, silence_seconds=0) == []
    unchanged(redis_client, lambda: outbox.retry(webhook, 0, FAILED))
    assert take(outbox) == []


def test_several_deliverers_share_the_webhooks(store: TaskStore, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        ids = [ended(store, client) for _ in range(7)]
    taken = []
    with redis.Redis.from_url(redis_url) as one, redis.Redis.from_url(redis_url) as other:
        for _ in range(4):
            taken += take(Outbox(one), 1) + take(Outbox(other), 1)
    assert sorted(webhook.task_id for webhook in taken) == sorted(ids)


def test_a_webhook_of_a_dead_deliverer_returns(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    ended(store, redis_client)
    (webhook,) = take(outbox)
    assert take(outbox) == []
    assert take(outbox, silence_seconds=0) == [webhook]


def test_a_failed_attempt_is_retried_when_due(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    ended(store, redis_client)
    for tries in range(3):
        (webhook,) = take(outbox)
        assert webhook.tries == tries
        outbox.retry(webhook, 600, FAILED)
        assert redis_client.xlen(keys.OUTBOX) == 0
        ((_, due),) = redis_client.zrange(keys.OUTBOX_DUE, 0, -1, withscores=True)
        assert due == pytest.approx(redis_client.time()[0] + 600, abs=60)
        pass_time(redis_client, 500)
        assert take(outbox, silence_seconds=0) == []
        pass_time(redis_client, 101)
    (webhook,) = take(outbox)
    outbox.retry(webhook, 0, None)
    assert take(outbox)[0].tries == 3


def test_a_deliverer_that_is_too_late_changes_nothing(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    """A deliverer that was idle for too long must not cause a third delivery."""
    ended(store, redis_client)
    (late,) = take(outbox)
    (webhook,) = take(outbox, silence_seconds=0)
    outbox.retry(late, 600, FAILED)
    outbox.done(webhook, SENT)
    assert not redis_client.exists(keys.OUTBOX_DUE)
    ended(store, redis_client)
    (late,) = take(outbox)
    (webhook,) = take(outbox, silence_seconds=0)
    outbox.retry(late, 0, FAILED)
    (again,) = take(outbox)
    outbox.done(webhook, SENT)
    outbox.retry(again, 0, FAILED)
    assert take(outbox, silence_seconds=0) == []
    assert not redis_client.exists(keys.OUTBOX_DUE)


def test_two_failures_of_one_attempt_count_once(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    ended(store, redis_client)
    (late,) = take(outbox)
    (webhook,) = take(outbox, silence_seconds=0)
    outbox.retry(webhook, 0, FAILED)
    unchanged(redis_client, lambda: outbox.retry(late, 600, FAILED))
    assert take(outbox)[0].tries == 1


def test_a_task_is_kept_for_its_webhook(redis_client: RedisClient) -> None:
    """Otherwise its text would expire before the last attempt."""
    store = TaskStore(redis_client, retention_seconds=600)
    outbox = Outbox(redis_client, retention_seconds=600)
    task_id = submit(store, redis_client, webhook=URL, idempotency_key="k")
    settle(store, claim_one(store), 0, 2)
    kept = [key for key in redis_client.scan_iter() if task_id in key.decode() or b":idem:" in key]
    assert len(kept) == 5
    for key in [*kept, keys.OUTBOX]:
        assert 86400 < redis_client.ttl(key) <= 2 * 86400, key
    (webhook,) = take(outbox)
    outbox.retry(webhook, 0, FAILED)
    assert 86400 < redis_client.ttl(keys.OUTBOX_DUE) <= 2 * 86400
    outbox.done(take(outbox)[0], SENT)
    for key in kept:
        assert 590 < redis_client.ttl(key) <= 600, key


def test_a_task_is_kept_for_a_minute_after_a_late_delivery(
    store: TaskStore, redis_client: RedisClient
) -> None:
    task_id = ended(store, redis_client)
    redis_client.hset(keys.run(task_id), "finished_at", redis_client.time()[0] - 7200)
    outbox = Outbox(redis_client, retention_seconds=3600)
    outbox.done(take(outbox)[0], SENT)
    assert 50 < redis_client.ttl(keys.run(task_id)) <= 60


def test_a_longer_retention_is_not_shortened(redis_client: RedisClient) -> None:
    store = TaskStore(redis_client, retention_seconds=10 * 86400)
    task_id = submit(store, redis_client, webhook=URL)
    store.cancel(task_id)
    assert redis_client.ttl(keys.run(task_id)) > 9 * 86400


def test_a_webhook_of_a_deleted_task_is_dropped(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    first, second = ended(store, redis_client), ended(store, redis_client)
    redis_client.delete(keys.run(first))
    (webhook,) = take(outbox)
    assert webhook.task_id == second
    redis_client.delete(keys.run(second))
    before = dump(redis_client).keys()
    outbox.retry(webhook, 5, FAILED)
    outbox.done(webhook, SENT)
    assert dump(redis_client).keys() == before
    assert redis_client.xlen(keys.OUTBOX) == 0


def test_full_memory_does_not_prevent_deliveries(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    for _ in range(2):
        ended(store, redis_client)
    redis_client.config_set("maxmemory", 1)
    try:
        first, second = take(outbox)
        outbox.done(first, SENT)
        outbox.retry(second, 0, FAILED)
        outbox.done(take(outbox)[0], SENT)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert redis_client.xlen(keys.OUTBOX) == 0


def test_the_task_says_what_became_of_its_webhook(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    task_id = submit(store, redis_client, webhook=URL)

    def delivery() -> WebhookDelivery:
        found = snapshot_of(store, task_id).webhook
        assert found is not None
        return found

    assert delivery() == WebhookDelivery(url=URL, state="pending")
    settle(store, claim_one(store))
    outbox.retry(take(outbox)[0], 600, FAILED)
    due = redis_client.zscore(keys.OUTBOX_DUE, task_id)
    failed = WebhookDelivery(
        url=URL, state="pending", attempts=1, last_status=503, last_error="status 503", next_attempt_at=due
    )
    assert delivery() == failed
    pass_time(redis_client, 601)
    (webhook,) = take(outbox)
    outbox.retry(webhook, 0, None)
    assert delivery().attempts == 1
    outbox.done(take(outbox)[0], SENT)
    ended_at = delivery().ended_at
    assert ended_at is not None
    assert delivery() == WebhookDelivery(
        url=URL, state="delivered", attempts=2, last_status=200, ended_at=ended_at
    )


def test_a_webhook_that_was_given_up_has_failed(
    store: TaskStore, outbox: Outbox, redis_client: RedisClient
) -> None:
    task_id = ended(store, redis_client)
    outbox.done(take(outbox)[0], Attempt(None, "refused"))
    found = snapshot_of(store, task_id).webhook
    assert found is not None
    assert (found.state, found.attempts, found.last_status, found.last_error) == (
        "failed",
        1,
        None,
        "refused",
    )
