"""The hub: one connection, each message to all subscribers, and `replay` where messages may be missing."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from api.redis_clients import connect_subscriber
from api.streams.pubsub_hub import MAX_PENDING, PubSubHub, Subscription


@pytest.fixture
def hub(redis_url: str, redis_client: redis.Redis) -> Iterator[PubSubHub]:
    hub = PubSubHub(lambda: connect_subscriber(redis_url), lambda name: redis_client.publish(name, b""))
    yield hub
    hub.close()


def take(subscription: Subscription, number: int) -> list[bytes]:
    """The next messages. A request to replay in between is ignored."""
    messages: list[bytes] = []
    while len(messages) < number:
        messages += subscription.wait(30).messages
    return messages


def live(subscription: Subscription) -> None:
    assert subscription.wait(30).replay


def test_a_subscription_starts_with_a_replay(hub: PubSubHub, redis_client: redis.Redis) -> None:
    with hub.subscribe("c") as subscription:
        live(subscription)
        redis_client.publish("c", b"1")
        arrived = subscription.wait(30)
        assert (arrived.replay, arrived.messages) == (False, [b"1"])
        assert subscription.wait(0) == (False, [])


def test_joining_a_live_channel_starts_with_a_replay(hub: PubSubHub) -> None:
    with hub.subscribe("c") as first:
        live(first)
        with hub.subscribe("c") as second:
            live(second)
        assert first.wait(0) == (False, [])


def test_messages_reach_all_subscribers_of_their_channel_only(
    hub: PubSubHub, redis_client: redis.Redis
) -> None:
    with hub.subscribe("c") as a, hub.subscribe("c") as b, hub.subscribe("d") as other:
        for subscription in (a, b, other):
            live(subscription)
        redis_client.publish("c", b"1")
        redis_client.publish("d", b"2")
        assert [take(a, 1), take(b, 1), take(other, 1)] == [[b"1"], [b"1"], [b"2"]]


def test_all_streams_share_one_connection(hub: PubSubHub, redis_client: redis.Redis) -> None:
    def subscriptions() -> Any:
        return [client for client in redis_client.client_list() if int(client["sub"])]

    with hub.subscribe("a") as a, hub.subscribe("b") as b, hub.subscribe("b") as c:
        for subscription in (a, b, c):
            live(subscription)
        (connection,) = subscriptions()
        assert int(connection["sub"]) == 3
    # The last to leave a channel ends its subscription; only the hub's own is left.
    while int(subscriptions()[0]["sub"]) != 1:
        pass


def test_a_channel_can_be_left_and_joined_again(hub: PubSubHub, redis_client: redis.Redis) -> None:
    for number in range(20):
        with hub.subscribe("c") as subscription:
            live(subscription)
            redis_client.publish("c", str(number))
            assert take(subscription, 1) == [str(number).encode()]


def test_a_reconnection_causes_a_replay(hub: PubSubHub, redis_client: redis.Redis) -> None:
    """redis-py reconnects silently. Only the new confirmation shows that messages may be lost."""
    with hub.subscribe("c") as subscription:
        live(subscription)
        redis_client.client_kill_filter(_type="pubsub")
        live(subscription)
        redis_client.publish("c", b"1")
        assert take(subscription, 1) == [b"1"]


def test_a_slow_subscriber_must_replay(hub: PubSubHub, redis_client: redis.Redis) -> None:
    """redis-py#1261: a slow reader made Redis close the connection and lost events. Others are unaffected."""
    number = 2 * MAX_PENDING + 10
    with hub.subscribe("c") as slow, hub.subscribe("c") as quick:
        live(slow)
        live(quick)
        heard = []
        reader = threading.Thread(target=lambda: heard.extend(take(quick, number)))
        reader.start()
        for i in range(number):
            redis_client.publish("c", str(i))
        reader.join()
        assert heard == [str(i).encode() for i in range(number)]
        arrived = slow.wait(30)
        assert arrived.replay
        # The newest messages remain, without a gap and within the bound.
        assert len(arrived.messages) <= MAX_PENDING
        assert arrived.messages == heard[len(heard) - len(arrived.messages) :]


def test_a_replay_discards_queued_messages() -> None:
    subscription = Subscription("c")
    subscription.put(b"1")
    subscription.must_replay()
    subscription.put(b"2")
    assert subscription.wait(0) == (True, [b"2"])


def test_redis_may_be_down_at_the_first_subscription(redis_url: str, redis_client: redis.Redis) -> None:
    """The hub retries until it is connected, and keeps all subscriptions."""
    refused = threading.Event()
    clients = iter([connect_subscriber("redis://127.0.0.1:1/0"), connect_subscriber(redis_url)])

    class Flaky:
        """A client whose first connection fails."""

        def __enter__(self) -> Any:
            self.client = next(clients)
            return self

        def __exit__(self, *error: Any) -> None:
            self.client.close()

        def pubsub(self) -> Any:
            pubsub = self.client.pubsub()
            if not refused.is_set():
                refused.set()
                self.client = next(clients)
            return pubsub

    hub = PubSubHub(cast(Any, Flaky), lambda name: redis_client.publish(name, b""))
    with hub.subscribe("c") as subscription:
        assert refused.wait(30)
        live(subscription)
        redis_client.publish("c", b"1")
        assert take(subscription, 1) == [b"1"]
    hub.close()


def test_no_thread_before_the_first_subscription(hub: PubSubHub) -> None:
    """A server may fork after creating the application, and a thread would not survive in the child."""
    assert not hub.is_running
    hub.close()
