"""Each kind of leftover in Redis is detected, beside keys that may stay."""

from collections.abc import Callable

import pytest
import redis

from tests.chaos import leftovers
from tests.tokenmill.protocol.store.tasks import SLUG, claim_one, settle, submit
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore

Plant = Callable[["redis.Redis", str], object]


def run_one(client: "redis.Redis") -> str:
    store = TaskStore(client)
    task_id = submit(store, client)
    settle(store, claim_one(store), 0, 3)
    return task_id


def test_ended_tasks_leave_no_problem(redis_client: "redis.Redis") -> None:
    run_one(redis_client)
    store = TaskStore(redis_client)
    store.cancel(submit(store, redis_client))
    assert leftovers.is_quiet(redis_client, SLUG)
    assert leftovers.look(redis_client, SLUG) == []


@pytest.mark.parametrize("claimed", [False, True])
def test_a_task_that_has_not_ended_is_not_quiet(redis_client: "redis.Redis", claimed: bool) -> None:
    store = TaskStore(redis_client)
    task_id = submit(store, redis_client)
    if claimed:
        claim_one(store)
    assert not leftovers.is_quiet(redis_client, SLUG)
    problems = leftovers.look(redis_client, SLUG)
    assert {problem.kind for problem in problems} >= {"stuck"}
    text = " ".join(problem.text for problem in problems)
    assert f"{keys.run(task_id)} has not ended" in text
    assert (keys.LEASES if claimed else "tokenmill:order:") in text


def add_a_token(client: "redis.Redis", task_id: str) -> None:
    client.xadd(keys.log(task_id), {"t": 9, "x": '""'}, "0-9")


@pytest.mark.parametrize(
    ("kind", "text", "plant"),
    [
        ("stuck", "tokenmill:leases is left over", lambda client, _: client.zadd(keys.LEASES, {"x": 1})),
        ("stuck", "rq:wip:q is left over", lambda client, _: client.zadd("rq:wip:q", {"x:y": 1})),
        ("stuck", "lock is left over", lambda client, _: client.set("tokenmill:reaper:lock", 1, ex=99)),
        ("stuck", "is never deleted", lambda client, task_id: client.persist(keys.log(task_id))),
        ("stuck", "is never deleted", lambda client, _: client.set("tokenmill:new-thing", 1)),
        (
            "lost",
            "0 tasks finished, there are 1",
            lambda client, _: client.hdel(keys.totals(SLUG), "finished:stop"),
        ),
        (
            "doubled",
            "2 tasks finished, there are 1",
            lambda client, _: client.hincrby(keys.totals(SLUG), "finished:stop"),
        ),
        ("lost", "totals have 3 tokens, there are 4", add_a_token),
    ],
)
def test_a_leftover_is_detected(redis_client: "redis.Redis", kind: str, text: str, plant: Plant) -> None:
    plant(redis_client, run_one(redis_client))
    problems = leftovers.look(redis_client, SLUG)
    assert [problem.kind for problem in problems] == [kind]
    assert text in problems[0].text
