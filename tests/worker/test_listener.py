"""What the worker hears on Redis's channels, and that it hears again after a lost connection."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.worker.workshop import SLUG, submit
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.listener import Listener
from worker.ownership import OwnedTasks, Ownership


class Ear:
    def __init__(self, url: str) -> None:
        self.client: Any = connect(url, "listener")
        self.wake = threading.Event()
        self.owned_tasks = OwnedTasks(threading.Event())
        self.cancelled: list[Ownership] = []
        self.num_shutdowns = 0
        self.store = TaskStore(self.client)
        self.listener = Listener(
            self.client,
            self.store,
            self.owned_tasks,
            slug=SLUG,
            worker_name="w",
            wake=self.wake,
            on_cancel=self.cancelled.append,
            on_shutdown=self.shut_down,
        )

    def shut_down(self) -> None:
        self.num_shutdowns += 1

    def hear(self, condition: Callable[[], Any]) -> None:
        """Turns until it is so; each waits for a message."""
        for _ in range(50):
            if condition():
                return
            self.listener.turn()
        raise AssertionError("not heard")

    def subscribe(self) -> None:
        self.hear(self.wake.is_set)
        for _ in range(2):
            self.listener.turn()
        self.wake.clear()


@pytest.fixture
def ear(redis_url: str) -> Any:
    ear = Ear(redis_url)
    ear.subscribe()
    yield ear
    ear.listener.close()
    ear.client.close()


def claim(ear: Ear, client: "redis.Redis") -> Ownership:
    submit(client)
    (claimed,) = ear.store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
    ownership = Ownership(claimed.task_id, claimed.owner)
    ear.owned_tasks.take(ownership)
    return ownership


def test_a_submission_wakes(ear: Ear, redis_client: "redis.Redis") -> None:
    submit(redis_client)
    ear.hear(ear.wake.is_set)


def test_a_cancel_of_a_held_task_is_heard(ear: Ear, redis_client: "redis.Redis") -> None:
    held = claim(ear, redis_client)
    TaskStore(redis_client).cancel(held.task_id)
    ear.hear(lambda: ear.cancelled == [held])


def test_stop_job_is_a_cancel(ear: Ear, redis_client: "redis.Redis") -> None:
    held = claim(ear, redis_client)
    command = {"command": "stop-job", "job_id": held.task_id}
    redis_client.publish("rq:pubsub:w", json.dumps(command))
    ear.hear(lambda: ear.cancelled == [held])


def test_a_command_survives_an_error_of_redis(ear: Ear, redis_client: "redis.Redis") -> None:
    """rq#2227: the stop command was ignored."""
    held = claim(ear, redis_client)
    cancel, faults = ear.store.cancel, [redis.ConnectionError("away"), redis.TimeoutError("slow")]

    def fail_first(task_id: str) -> str | None:
        if faults:
            raise faults.pop()
        return cancel(task_id)

    ear.store.cancel = fail_first  # type: ignore[method-assign] # a call that fails
    redis_client.publish("rq:pubsub:w", json.dumps({"command": "stop-job", "job_id": held.task_id}))
    for _ in range(2):
        with pytest.raises(redis.RedisError):
            ear.hear(lambda: False)
    # Its own cancel goes unheard, as the subscription comes later; a write or a renewal tells.
    ear.hear(lambda: redis_client.hget(keys.run(held.task_id), "terminal") == b"cancelled")


def test_nonsense_says_nothing(ear: Ear, redis_client: "redis.Redis") -> None:
    held = claim(ear, redis_client)
    for nonsense in (
        b"\xff",
        b"{",
        b"[]",
        b"null",
        b'{"cancel": 5}',
        b'{"cancel": "unknown"}',
        b'{"command": []}',
    ):
        redis_client.publish(keys.CONTROL, nonsense)
        redis_client.publish("rq:pubsub:w", nonsense)
    redis_client.publish("rq:pubsub:w", b'{"command": "shutdown"}')
    ear.hear(lambda: ear.num_shutdowns)

    assert ear.cancelled == []
    assert held in ear.owned_tasks


def test_after_a_lost_connection_it_hears_again(ear: Ear, redis_client: "redis.Redis") -> None:
    """rq#1836: after a reconnect the worker ignored all commands. And what went unheard wakes it."""
    held = claim(ear, redis_client)
    ear.hear(ear.wake.is_set)
    ear.wake.clear()
    assert redis_client.client_kill_filter(skipme=True, _type="pubsub")
    with pytest.raises(redis.RedisError):  # after what had arrived before the connection broke
        ear.hear(lambda: False)
    ear.wake.clear()
    ear.hear(ear.wake.is_set)
    ear.hear(lambda: redis_client.pubsub_numsub(keys.CONTROL)[0][1])

    redis_client.publish(keys.CONTROL, json.dumps({"cancel": held.task_id}))
    ear.hear(lambda: ear.cancelled == [held])
