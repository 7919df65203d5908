"""The list of a tenant's tasks: its order, its filters, its pages, and tasks that leave it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import claim, claim_one, dump, reap, settle, submit
from tokenmill.protocol import keys
from tokenmill.protocol.naming import tenant_hash
from tokenmill.protocol.snapshots import ListCursor
from tokenmill.protocol.store.audit import Audit
from tokenmill.protocol.store.task_store import TaskStore


def listed(store: TaskStore, tenant: str = "default", page: int = 200, **filters: Any) -> list[str]:
    """All ids, page by page."""
    ids: list[str] = []
    cursor: ListCursor | None = None
    while True:
        found = store.list_tasks(tenant, after=cursor, max_examined=page, **filters)
        ids += [task.snapshot.task_id for task in found.tasks]
        cursor = found.next
        if cursor is None:
            return ids


@pytest.mark.parametrize("page", [1, 2, 3, 200])
def test_tasks_are_listed_newest_first_and_by_tenant(
    store: TaskStore, redis_client: RedisClient, page: int
) -> None:
    ids = [submit(store, redis_client) for _ in range(5)]
    other = submit(store, redis_client, tenant="other")
    assert listed(store, page=page) == ids[::-1]
    assert listed(store, "other", page) == [other]
    assert listed(store, "nobody", page) == []


def test_a_list_shows_state_usage_and_error(store: TaskStore, redis_client: RedisClient) -> None:
    failed = submit(store, redis_client, metadata='{"a": 1}')
    settle(store, claim_one(store), 0, 2, reason="error")
    waiting = submit(store, redis_client)
    second, first = store.list_tasks("default").tasks
    assert (first.snapshot.task_id, first.snapshot.status) == (failed, "failed")
    assert first.snapshot.metadata == '{"a": 1}'
    assert first.last_entry is not None
    assert first.last_entry.parse_members()["done"] is True
    assert (second.snapshot.task_id, second.snapshot.status) == (waiting, "queued")
    assert second.last_entry is None


def test_filters(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(4)]
    claimed = claim_one(store)
    settle(store, claimed)
    store.cancel(ids[1])
    assert listed(store, status="completed") == [claimed.task_id]
    assert listed(store, status="cancelled", page=1) == [ids[1]]
    assert listed(store, status="queued") == ids[:1:-1]
    assert listed(store, model="tiny/model") == ids[::-1]
    assert listed(store, model="another") == []
    times = {one.snapshot.task_id: one.snapshot.accepted_us for one in store.list_tasks("default").tasks}
    assert listed(store, accepted_from_us=times[ids[2]]) == ids[:1:-1]
    assert listed(store, accepted_before_us=times[ids[2]], page=1) == ids[1::-1]


def test_tasks_of_one_microsecond_are_on_one_page_each(store: TaskStore, redis_client: RedisClient) -> None:
    """As two models may accept them."""
    ids = sorted((submit(store, redis_client) for _ in range(6)), reverse=True)
    index = keys.tasks("default")
    for task_id in ids[1:5]:
        redis_client.zadd(index, {task_id: 1764580000000000})
    expected = [id.decode() for id in redis_client.zrange(index, 0, -1, desc=True)]
    for page in (5, 6, 200):
        assert listed(store, page=page) == expected


@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(st.sampled_from(["submit", "erase", "expire", "page"]), max_size=30), st.integers(1, 4))
def test_pages_miss_no_task_that_stays(
    redis_client: RedisClient, store: TaskStore, steps: list[str], size: int
) -> None:
    """While tasks are added, erased and expire, a task that stays is shown exactly once."""
    redis_client.flushdb()
    first = [submit(store, redis_client) for _ in range(6)]
    kept, seen = set(first), []
    cursor: ListCursor | None = None
    is_over = False
    for position, step in enumerate([*steps, *["page"] * 20]):
        if step == "submit":
            submit(store, redis_client)
        elif step == "page" and not is_over:
            page = store.list_tasks("default", after=cursor, max_examined=size)
            seen += [task.snapshot.task_id for task in page.tasks]
            cursor, is_over = page.next, page.next is None
        elif step in ("erase", "expire") and kept:
            gone = sorted(kept)[position % len(kept)]
            kept.discard(gone)
            store.cancel(gone)
            if step == "erase":
                assert store.erase(gone) is True
            else:
                redis_client.delete(keys.run(gone))
    assert is_over
    assert len(seen) == len(set(seen))
    assert kept <= set(seen)


def test_expired_tasks_leave_the_list(redis_client: RedisClient) -> None:
    store = TaskStore(redis_client, retention_seconds=0.001)
    gone, kept = submit(store, redis_client), submit(store, redis_client)
    store.cancel(gone)
    while redis_client.exists(keys.run(gone)):
        pass
    while redis_client.zcard(keys.tasks("default")) == 2:
        reap(store)
    assert listed(store) == [kept]
    assert redis_client.zcard(keys.ENDED) == 0


def test_a_task_whose_keys_are_kept_longer_stays_listed(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    store.cancel(task_id)
    (member,) = redis_client.zrange(keys.ENDED, 0, -1)
    redis_client.zadd(keys.ENDED, {member: 1})
    reap(store)
    assert listed(store) == [task_id]
    assert redis_client.zscore(keys.ENDED, member) > redis_client.time()[0]


@pytest.mark.parametrize("damage", ["delete", "overwrite"])
def test_an_audit_restores_the_list(store: TaskStore, redis_client: RedisClient, damage: str) -> None:
    ids = [submit(store, redis_client, tenant="a") for _ in range(3)]
    store.cancel(ids[0])
    index = keys.tasks(tenant_hash("a"))
    for key in (index, keys.ENDED):
        redis_client.delete(key)
        if damage == "overwrite":
            redis_client.set(key, "x")
    assert listed(store, "a") == []
    Audit(redis_client).run()
    assert listed(store, "a") == ids[::-1]
    assert redis_client.zcard(keys.ENDED) == 1


def test_a_damaged_record_hides_itself_only(store: TaskStore, redis_client: RedisClient) -> None:
    first, second, third = (submit(store, redis_client) for _ in range(3))
    redis_client.set(keys.run(second), "x")
    redis_client.set(keys.log(third), "x")
    assert listed(store) == [third, first]


@pytest.mark.parametrize(
    "field", ["accepted_us", "priority", "metadata", "prompt_tokens", "finished_at", "webhook_tries"]
)
def test_a_damaged_field_hides_its_task_only(store: TaskStore, redis_client: RedisClient, field: str) -> None:
    first, second = (submit(store, redis_client, webhook="http://example.org/") for _ in range(2))
    redis_client.hset(keys.run(second), field, "{soon")
    assert listed(store) == [first]


def test_an_audit_passes_a_waiting_task_without_its_acceptance(
    store: TaskStore, redis_client: RedisClient
) -> None:
    damaged, sound = submit(store, redis_client), submit(store, redis_client)
    redis_client.hset(keys.run(damaged), "accepted_us", "soon")
    for key in redis_client.scan_iter("tokenmill:order:*"):
        redis_client.delete(key)
    Audit(redis_client).run()
    assert claim_one(store).task_id == sound


def test_a_cursor_keeps_the_bound_of_the_time(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(3)]
    newest, middle, _ = (one.snapshot for one in store.list_tasks("default").tasks)
    cursor = ListCursor(str(newest.accepted_us), newest.task_id)
    found = store.list_tasks("default", after=cursor, accepted_before_us=middle.accepted_us)
    assert [one.snapshot.task_id for one in found.tasks] == ids[:1]


def test_a_task_that_redis_lost_leaves_the_list(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(2)]
    redis_client.delete(*map(keys.run, ids))
    assert claim(store) == []
    assert redis_client.zcard(keys.tasks("default")) == 0


class TestErasing:
    def test_an_index_of_the_wrong_type_does_not_prevent_it(
        self, store: TaskStore, redis_client: RedisClient
    ) -> None:
        task_id = submit(store, redis_client)
        store.cancel(task_id)
        for key in (keys.tasks("default"), keys.ENDED, keys.OUTBOX_DUE):
            redis_client.delete(key)
            redis_client.set(key, "x")
        assert store.erase(task_id) is True
        assert store.inspect(task_id) is None

    def test_an_ended_task_leaves_nothing(self, store: TaskStore, redis_client: RedisClient) -> None:
        task_id = submit(store, redis_client, idempotency_key="k", webhook="http://example.org/")
        settle(store, claim_one(store), 0, 2)
        assert store.erase(task_id) is True
        assert not [key for key in dump(redis_client) if task_id.encode() in key or b":idem:" in key]
        for key in redis_client.scan_iter("rq:*"):
            if redis_client.type(key) == b"zset":
                assert task_id.encode() not in redis_client.zrange(key, 0, -1)
        assert store.erase(task_id) is None
        assert store.inspect(task_id) is None
        assert listed(store) == []

    def test_a_task_that_has_not_ended_stays(self, store: TaskStore, redis_client: RedisClient) -> None:
        task_id = submit(store, redis_client)
        before = dump(redis_client)
        assert store.erase(task_id) is False
        assert dump(redis_client) == before

    def test_the_key_of_a_newer_task_stays(self, store: TaskStore, redis_client: RedisClient) -> None:
        """Its own entry had expired, and another task took the key."""
        task_id = submit(store, redis_client, idempotency_key="k")
        store.cancel(task_id)
        (record,) = redis_client.scan_iter("tokenmill:idem:*")
        redis_client.set(record, "digest:another")
        assert store.erase(task_id) is True
        assert redis_client.get(record) == b"digest:another"
