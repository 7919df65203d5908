"""A task returns to its position in the queue when it is handed back or its lease lapses."""

import pytest
from rq.job import JobStatus
from rq.registry import (
    StartedJobRegistry,
)

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    fetch,
    owned,
    publish,
    reap,
    submission,
    submit,
    unchanged,
    waiting,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import LogEntry, Usage
from tokenmill.protocol.records import Reaped, Renewed, Settlement, Write
from tokenmill.protocol.store.task_store import TaskStore

WATCHDOG_SECONDS = 60


def test_a_renewed_lease_does_not_lapse(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    claimed = claim_one(store, lease_seconds=-1)
    assert store.renew(owned([claimed]), 60) == Renewed()
    assert reap(store) == Reaped()
    assert store.renew(owned([claimed]), -1) == Renewed()
    assert reap(store).returned == (claimed.task_id,)
    assert store.renew(owned([claimed]), 60) == Renewed(lost=frozenset({claimed.task_id}))


def test_leases_use_the_clock_of_redis(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    claimed = claim_one(store, lease_seconds=60)
    seconds, microseconds = redis_client.time()
    lapses = redis_client.zscore(keys.LEASES, claimed.task_id)
    assert 0 < seconds + microseconds / 1e6 + 60 - lapses < WATCHDOG_SECONDS


def test_nothing_happens_without_owned_tasks(store: TaskStore, redis_client: RedisClient) -> None:
    assert store.renew({}, 60) == Renewed()
    assert store.hand_back({}) == 0
    assert store.renew({"unknown": "me"}, 60) == Renewed(lost=frozenset({"unknown"}))
    assert unchanged(redis_client, lambda: store.hand_back({"unknown": "me"})) == 0


def test_rq_shows_a_recent_heartbeat(store: TaskStore, redis_client: RedisClient) -> None:
    """rq#1164: jobs whose worker is gone stay `started` with an old heartbeat."""
    submit(store, redis_client)
    claimed = claim_one(store)
    claimed_at = fetch(redis_client, claimed.task_id).last_heartbeat
    store.renew(owned([claimed]), 60)
    job = fetch(redis_client, claimed.task_id)
    execution = job.get_executions()[0]
    assert claimed_at is not None
    assert job.last_heartbeat is not None
    assert execution.last_heartbeat is not None
    assert job.last_heartbeat > claimed_at
    assert execution.last_heartbeat > claimed_at


def test_tasks_are_handed_back_to_the_front_in_order(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(6)]
    queue = claim(store, 4)[0].queue
    held = {task_id: fetch_owner(redis_client, task_id) for task_id in (ids[2], ids[0], ids[3], ids[1])}
    assert store.hand_back(held) == 4
    assert waiting(redis_client, queue) == ids
    assert [claimed.task_id for claimed in claim(store)] == ids


def fetch_owner(client: RedisClient, task_id: str) -> str:
    owner: bytes = client.hget(keys.run(task_id), "owner")
    return owner.decode()


def test_tasks_of_two_workers_are_handed_back_in_order(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client, cost=10**n) for n in range(4)]
    first, second, third = claim(store, 3)
    for tasks in ([second], [first, third]):
        store.hand_back(owned(tasks))
    assert waiting(redis_client, first.queue) == ids
    ahead = [snapshot.tokens_ahead for task_id in ids if (snapshot := store.inspect(task_id))]
    assert ahead == [0, 1, 11, 111]


def test_a_task_handed_back_is_queued_again(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client)
    store.submit(given)
    claimed = claim_one(store)
    publish(store, claimed, 0, 0, waiting_for="kv_blocks", position="3", tokens_ahead="7")
    assert store.hand_back(owned([claimed])) == 1
    job = fetch(redis_client, given.task_id)
    assert (job.get_status(), job.started_at, job.worker_name) == (JobStatus.QUEUED, None, None)
    assert job.get_executions() == []
    assert StartedJobRegistry(given.queue, connection=redis_client).count == 0
    assert not redis_client.exists(keys.LEASES)
    snapshot = store.inspect(given.task_id)
    assert snapshot is not None
    assert (snapshot.claimed, snapshot.position, snapshot.waiting_for) == (False, 0, "worker")
    assert unchanged(redis_client, lambda: store.hand_back(owned([claimed]))) == 0


def test_a_former_owner_cannot_hand_back(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    old = claim_one(store, lease_seconds=-1)
    reap(store)
    claim_one(store)
    assert unchanged(redis_client, lambda: store.hand_back(owned([old]))) == 0


def test_lapsed_tasks_return_in_order(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(5)]
    lapsed = claim(store, 3, lease_seconds=-1)
    held = claim_one(store)
    assert sorted(reap(store).returned) == sorted(one.task_id for one in lapsed)
    assert waiting(redis_client, held.queue) == [*ids[:3], ids[4]]
    assert reap(store) == Reaped()


def test_repeated_reaping_requeues_a_task_once(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    lapsed = claim_one(store, lease_seconds=-1)
    assert [reap(store).returned for _ in range(3)] == [(lapsed.task_id,), (), ()]
    assert waiting(redis_client, lapsed.queue) == [lapsed.task_id]


def test_a_queued_task_wakes_a_waiting_worker(store: TaskStore, redis_client: RedisClient) -> None:
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.wake(SLUG))
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        submit(store, redis_client)
        store.hand_back(owned([claim_one(store)]))
        claim_one(store, lease_seconds=-1)
        reap(store)
        assert [pubsub.get_message(timeout=60)["type"] for _ in range(3)] == ["message"] * 3


@pytest.mark.parametrize("ending", ["renew", "hand_back", "reap"])
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_rq_ended_is_reported_to_its_owner(
    store: TaskStore, redis_client: RedisClient, ending: str, how: str
) -> None:
    submit(store, redis_client)
    claimed = claim_one(store, lease_seconds=-1)
    publish(store, claimed, 0, 1)
    getattr(fetch(redis_client, claimed.task_id), how)()
    if ending == "renew":
        assert store.renew(owned([claimed]), 60) == Renewed(cancelled=frozenset({claimed.task_id}))
    elif ending == "hand_back":
        assert store.hand_back(owned([claimed])) == 0
    else:
        assert reap(store) == Reaped(cancelled=(claimed.task_id,))
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert snapshot.status == "cancelled"
    assert snapshot.num_entries == 2
    assert not redis_client.exists(keys.LEASES)
    assert StartedJobRegistry(claimed.queue, connection=redis_client).count == 0


def test_a_task_whose_log_has_its_end_only_needs_a_settlement(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """If the log already has the end, no entry is needed to settle it."""
    submit(store, redis_client)
    first = claim_one(store, lease_seconds=-1)
    end = LogEntry.of_end("", "stop", usage=Usage(prompt_tokens=1, completion_tokens=0))
    store.publish([Write(task_id=first.task_id, owner=first.owner, entries=(end,))])
    reap(store)
    second = claim_one(store)
    assert second.entries == (end,)
    settlement = Settlement(status="completed", reason="stop", result="{}")
    store.publish([Write(task_id=second.task_id, owner=second.owner, first_seq=1, settlement=settlement)])
    assert len(store.read_log(second.task_id)) == 1
    assert fetch(redis_client, second.task_id).return_value() == {}
