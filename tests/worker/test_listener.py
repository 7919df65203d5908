"""What the listener receives on the channels of Redis, also after a lost connection."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.worker.fakes import SLUG, RecordingContext, submit
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.listener import Listener
from worker.ownership import Ownership


class ListenerHarness:
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

    def turn_until(self, condition: Callable[[], Any]) -> None:
        """Take turns until `condition` holds. Each waits for a message."""
        for _ in range(50):
            if condition():
                return
            self.listener.turn()
        raise AssertionError("the condition did not come true within 50 messages")

    def subscribe(self) -> None:
        self.turn_until(self.wake.is_set)
        for _ in range(2):
            self.listener.turn()
        self.wake.clear()


@pytest.fixture
def harness(redis_url: str) -> Any:
    harness = ListenerHarness(redis_url)
    harness.subscribe()
    yield harness
    harness.listener.close()
    harness.client.close()


def claim(harness: ListenerHarness, client: "redis.Redis") -> Ownership:
    submit(client)
    (claimed,) = harness.store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
    ownership = Ownership(claimed.task_id, claimed.owner)
    harness.context.owned_tasks.add(ownership)
    return ownership


def test_a_submission_wakes(harness: ListenerHarness, redis_client: "redis.Redis") -> None:
    submit(redis_client)
    harness.turn_until(harness.wake.is_set)


def test_a_cancel_of_an_owned_task_is_received(harness: ListenerHarness, redis_client: "redis.Redis") -> None:
    held = claim(harness, redis_client)
    TaskStore(redis_client).cancel(held.task_id)
    harness.turn_until(lambda: harness.cancelled == [held])


def test_stop_job_is_a_cancel(harness: ListenerHarness, redis_client: "redis.Redis") -> None:
    held = claim(harness, redis_client)
    command = {"command": "stop-job", "job_id": held.task_id}
    redis_client.publish("rq:pubsub:w", json.dumps(command))
    harness.turn_until(lambda: harness.cancelled == [held])


def test_a_command_survives_an_error_of_redis(harness: ListenerHarness, redis_client: "redis.Redis") -> None:
    """rq#2227: the stop command was ignored."""
    held = claim(harness, redis_client)
    cancel, faults = harness.store.cancel, [redis.ConnectionError("away"), redis.TimeoutError("slow")]

    def fail_first(task_id: str) -> str | None:
        if faults:
            raise faults.pop()
        return cancel(task_id)

    harness.store.cancel = fail_first  # type: ignore[method-assign] # a call that fails
    redis_client.publish("rq:pubsub:w", json.dumps({"command": "stop-job", "job_id": held.task_id}))
    for _ in range(2):
        with pytest.raises(redis.RedisError):
            harness.turn_until(lambda: False)
    # The message of this cancel is missed, as the subscription comes later. A write or a renewal shows it.
    harness.turn_until(lambda: redis_client.hget(keys.run(held.task_id), "terminal") == b"cancelled")


def test_invalid_messages_are_ignored(harness: ListenerHarness, redis_client: "redis.Redis") -> None:
    held = claim(harness, redis_client)
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
    harness.turn_until(lambda: harness.context.stop_reasons.qsize())

    assert harness.cancelled == []
    assert held in harness.context.owned_tasks


def test_after_a_lost_connection_it_subscribes_again(
    harness: ListenerHarness, redis_client: "redis.Redis"
) -> None:
    """rq#1836: after a reconnect the worker ignored all commands. Subscribing wakes the intake."""
    held = claim(harness, redis_client)
    harness.turn_until(harness.wake.is_set)
    harness.wake.clear()
    assert redis_client.client_kill_filter(skipme=True, _type="pubsub")
    with pytest.raises(redis.RedisError):  # after the messages that arrived before
        harness.turn_until(lambda: False)
    harness.wake.clear()
    harness.turn_until(harness.wake.is_set)
    harness.turn_until(lambda: redis_client.pubsub_numsub(keys.CONTROL)[0][1])

    redis_client.publish(keys.CONTROL, json.dumps({"cancel": held.task_id}))
    harness.turn_until(lambda: harness.cancelled == [held])
