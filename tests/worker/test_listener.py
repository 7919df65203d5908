"""What the listener receives on the channels of Redis, also after a lost connection."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.worker.workshop import SLUG, RecordingContext, submit
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.listener import Listener
from worker.ownership import Ownership


class Ear:
    """A listener without its thread."""

    def __init__(self, url: str) -> None:
        self.client: Any = connect(url, "listener")
        self.context = RecordingContext()
        self.wake = self.context.wake
        self.store = TaskStore(self.client)
        self.listener = Listener(self.client, self.store, self.context)

    @property
    def cancelled(self) -> list[Ownership]:
        return self.context.cancelled

    def hear(self, condition: Callable[[], Any]) -> None:
        """Take turns until `condition` holds. Each waits for a message."""
        for _ in range(50):
            if condition():
                return
            self.listener.turn()
        raise AssertionError("the condition did not come true within 50 messages")

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
    ear.context.owned_tasks.add(ownership)
    return ownership


def test_a_submission_wakes(ear: Ear, redis_client: "redis.Redis") -> None:
    submit(redis_client)
    ear.hear(ear.wake.is_set)


def test_a_cancel_of_an_owned_task_is_received(ear: Ear, redis_client: "redis.Redis") -> None:
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
    # The message of this cancel is missed, as the subscription comes later. A write or a renewal shows it.
    ear.hear(lambda: redis_client.hget(keys.run(held.task_id), "terminal") == b"cancelled")


def test_invalid_messages_are_ignored(ear: Ear, redis_client: "redis.Redis") -> None:
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
    ear.hear(lambda: ear.context.stop_reasons.qsize())

    assert ear.cancelled == []
    assert held in ear.context.owned_tasks


def test_after_a_lost_connection_it_subscribes_again(ear: Ear, redis_client: "redis.Redis") -> None:
    """rq#1836: after a reconnect the worker ignored all commands. Subscribing wakes the intake."""
    held = claim(ear, redis_client)
    ear.hear(ear.wake.is_set)
    ear.wake.clear()
    assert redis_client.client_kill_filter(skipme=True, _type="pubsub")
    with pytest.raises(redis.RedisError):  # after the messages that arrived before
        ear.hear(lambda: False)
    ear.wake.clear()
    ear.hear(ear.wake.is_set)
    ear.hear(lambda: redis_client.pubsub_numsub(keys.CONTROL)[0][1])

    redis_client.publish(keys.CONTROL, json.dumps({"cancel": held.task_id}))
    ear.hear(lambda: ear.cancelled == [held])
