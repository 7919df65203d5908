"""Claims and workers that would never lapse, because keys were deleted or the clock was set back."""

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import SLUG, claim, claim_one, owned, publish, reap, submit
from tokenmill.protocol import keys
from tokenmill.protocol.records import Lost, WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore

HOUR = 3600.0


def now(client: RedisClient) -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


def lapse_of(client: RedisClient, task_id: str) -> float:
    return float(client.zscore(keys.LEASES, task_id) or 0)


def test_a_claim_without_a_lease_gets_one(store: TaskStore, redis_client: RedisClient) -> None:
    """The lease was deleted, and the worker killed."""
    submit(store, redis_client)
    held = claim_one(store, lease_seconds=7)
    redis_client.delete(keys.LEASES)
    assert reap(store).returned == (), "a live owner renews it meanwhile"
    assert 0 < lapse_of(redis_client, held.task_id) <= now(redis_client) + 7
    redis_client.zadd(keys.LEASES, {held.task_id: 1})
    assert reap(store).returned == (held.task_id,)


def test_a_lease_far_in_the_future_is_shortened(store: TaskStore, redis_client: RedisClient) -> None:
    """Redis's clock was set back by an hour."""
    submit(store, redis_client)
    submit(store, redis_client)
    short, long = claim(store, 1, lease_seconds=7)[0], claim(store, 1, lease_seconds=2 * HOUR)[0]
    redis_client.zincrby(keys.LEASES, HOUR, short.task_id)
    before = lapse_of(redis_client, long.task_id)
    reap(store)
    assert lapse_of(redis_client, short.task_id) <= now(redis_client) + 7
    assert lapse_of(redis_client, long.task_id) == before, "a long lease is no error"


def test_a_renewal_stores_the_duration(store: TaskStore, redis_client: RedisClient) -> None:
    """After a change of the setting, or for a claim of an older version, which stored none."""
    submit(store, redis_client)
    held = claim_one(store, lease_seconds=7)
    redis_client.hdel(keys.run(held.task_id), "lease_seconds")
    store.renew(owned([held]), HOUR)
    before = lapse_of(redis_client, held.task_id)
    reap(store)
    assert lapse_of(redis_client, held.task_id) == before


def test_all_claims_are_checked_in_turn(store: TaskStore, redis_client: RedisClient) -> None:
    """A hundred per call, in any queue."""
    ids = [submit(store, redis_client, priority=n % 3) for n in range(250)]
    claim(store, 250, lease_seconds=60)
    redis_client.delete(keys.LEASES)
    found = []
    for _ in range(3):
        reap(store)
        found.append(redis_client.zcard(keys.LEASES))
    assert found == [100, 200, len(ids)]
    redis_client.delete(keys.LEASES)
    for _ in range(3):
        reap(store)
    assert redis_client.zcard(keys.LEASES) == len(ids), "and from the start again"


def test_a_running_task_without_a_run_hash_leaves_nothing(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Regression: its keys had no expiry, and the number of claimed tasks stayed at one."""
    task_id = submit(store, redis_client)
    held = claim_one(store)
    publish(store, held, 0, 2)
    redis_client.delete(keys.run(task_id))
    assert store.queue_stats(SLUG).claimed == 1
    assert reap(store).lost == (task_id,)

    end = store.read_log(task_id)[-1]
    assert (end.finish_reason, end.done, end.error["code"]) == ("error", True, "lost")  # type: ignore[union-attr,index]
    assert store.queue_stats(SLUG).claimed == 0
    assert not redis_client.exists(keys.LEASES)
    of_task = list(redis_client.scan_iter(f"*{task_id}*"))
    assert of_task
    assert [key for key in of_task if redis_client.pttl(key) < 0] == []
    assert redis_client.hget(f"rq:job:{task_id}", "status") == b"failed"
    assert redis_client.smembers("rq:worker:worker-1:executions") == set()
    assert publish(store, held, 2, 1) == Lost()
    assert reap(store).lost == ()


def test_a_waiting_task_without_a_run_hash_is_lost(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    publish(store, claim_one(store, lease_seconds=-1), 0, 2)
    reap(store)
    redis_client.delete(keys.run(task_id))
    assert claim(store) == []
    end = store.read_log(task_id)[-1]
    assert (end.done, end.error["code"]) == (True, "lost")  # type: ignore[union-attr,index]
    assert redis_client.pttl(keys.log(task_id)) > 0


def record(name: str = "w") -> WorkerRecord:
    return WorkerRecord(name=name, model="m", slug=SLUG, state="ready", started_at=0.0)


def test_a_worker_with_a_record_from_the_future_is_not_ready(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """The clock was set back, and the worker killed. Regression: readiness listed it for an hour."""
    store.put_worker(record("dead"), 10)
    store.put_worker(record("alive"), 10)
    ahead = now(redis_client) + HOUR
    text = redis_client.get(keys.worker("dead")).decode()
    redis_client.set(
        keys.worker("dead"), f'{{"reported_at":{ahead:.6f},' + text.partition(",")[2], px=3_600_000
    )
    for key in (keys.WORKERS, keys.ready(SLUG)):
        redis_client.zadd(key, {"dead": ahead + 10})

    assert [one.name for one in store.workers()] == ["alive"]
    reap(store)
    assert store.queue_stats(SLUG).num_ready_workers == 1
    store.put_worker(record("dead"), 10)
    assert {one.name for one in store.workers()} == {"alive", "dead"}, "it reports again, so it is alive"


def test_a_worker_without_a_record_is_not_ready(store: TaskStore, redis_client: RedisClient) -> None:
    store.put_worker(record(), 10)
    redis_client.delete(keys.worker("w"))
    reap(store)
    assert store.queue_stats(SLUG).num_ready_workers == 0
