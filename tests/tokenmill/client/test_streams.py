"""Each reader gets every event once and in order, whenever it joins and whatever breaks."""

import json
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.conftest import free_port
from tests.redis_client import RedisClient
from tests.tokenmill.client.following import (
    Following,
    append_unheard,
    by_asyncio,
    by_iterator,
    num_log_reads,
    num_subscribers,
    wait_until,
    wait_until_live,
)
from tests.tokenmill.protocol.store.tasks import claim_one, final_write, publish, settle, submit, tokens
from tokenmill.client.streams import UnknownTask
from tokenmill.protocol import keys
from tokenmill.protocol.messages import Event, encode
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.serve import embedded_redis
from tokenmill.serve.child_processes import Child

NEVER_SECONDS = 3600.0
"""A silence that never passes, so that it never causes a read of the log."""

Follow = Callable[..., Generator[Event, None, None]]


@pytest.fixture(params=[by_iterator, by_asyncio])
def follow(request: pytest.FixtureRequest) -> Follow:
    follow: Follow = request.param
    return follow


@pytest.fixture
def store(redis_client: RedisClient) -> TaskStore:
    return TaskStore(redis_client)


@pytest.fixture
def claimed(store: TaskStore, redis_client: RedisClient) -> Claimed:
    submit(store, redis_client)
    return claim_one(store)


@contextmanager
def setting(client: RedisClient, name: str, value: str) -> Iterator[None]:
    before = client.config_get(name)[name]
    client.config_set(name, value)
    try:
        yield
    finally:
        client.config_set(name, before)


def test_a_finished_task_is_replayed_and_the_stream_ends(
    follow: Follow, store: TaskStore, redis_url: str, claimed: Claimed
) -> None:
    """arq PR364, romm#3195: a subscriber after the end must not hang."""
    settle(store, claimed, 0, 5)
    events = Following(follow(redis_url, claimed.task_id)).rest()
    assert events == store.read_log(claimed.task_id)
    assert [event.text for event in events] == [" t0", " t1", " t2", " t3", " t4", ""]


@pytest.mark.parametrize("after", [0, 3, 4, 5, 6, 2**70])
def test_a_stream_starts_after_any_event(
    follow: Follow, store: TaskStore, redis_url: str, claimed: Claimed, after: int
) -> None:
    """Also after the last event: the stream is then empty."""
    settle(store, claimed, 0, 5)
    events = Following(follow(redis_url, claimed.task_id, after)).rest()
    assert [event.seq for event in events] == [seq for seq in range(6) if seq > after]


def test_live_events_do_not_need_the_log(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 2)
    reads = num_log_reads(redis_client)
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS))
    assert following.take(2) == [0, 1]
    wait_until_live(redis_client, claimed.task_id, reads)
    publish(store, claimed, 2, 3)
    settle(store, claimed, 5)
    assert [event.seq for event in following.rest()] == [2, 3, 4, 5]
    assert num_log_reads(redis_client) == reads + 2


def test_a_stream_waits_for_the_first_event(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str
) -> None:
    task_id = submit(store, redis_client)
    following = Following(follow(redis_url, task_id))
    wait_until(lambda: num_subscribers(redis_client, task_id) == 1)
    settle(store, claim_one(store), 0, 2)
    assert [event.seq for event in following.rest()] == [0, 1, 2]


def test_an_unknown_task_is_an_error(follow: Follow, redis_url: str) -> None:
    error = Following(follow(redis_url, "0" * 32)).error()
    assert isinstance(error, UnknownTask)
    assert error.task_id == "0" * 32


def test_a_task_that_expires_meanwhile_is_an_error(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 1)
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=0.01))
    assert following.take(1) == [0]
    redis_client.delete(keys.run(claimed.task_id), keys.log(claimed.task_id))
    assert isinstance(following.error(), UnknownTask)


def test_a_cut_connection_causes_neither_gap_nor_duplicate(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    """redis-py#1464, #1572: after a reconnect a subscriber is deaf, or has missed messages."""
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS))
    for first in range(0, 12, 4):
        wait_until(lambda: num_subscribers(redis_client, claimed.task_id) == 1)
        publish(store, claimed, first, 2)
        redis_client.client_kill_filter(_type="pubsub")
        publish(store, claimed, first + 2, 2)
        assert following.take(4) == list(range(first, first + 4))
    settle(store, claimed, 12)
    assert [event.seq for event in following.rest()] == [12]


def test_any_connection_may_be_cut(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS))
    for seq in range(5):
        wait_until(lambda: num_subscribers(redis_client, claimed.task_id) == 1)
        redis_client.client_kill_filter(_type="normal", skipme=True)
        redis_client.client_kill_filter(_type="pubsub")
        publish(store, claimed, seq, 1)
        assert following.take(1) == [seq]


def test_a_lost_message_is_found_by_the_next_one(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    reads = num_log_reads(redis_client)
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS))
    wait_until_live(redis_client, claimed.task_id, reads)
    append_unheard(redis_client, claimed.task_id, 0)
    append_unheard(redis_client, claimed.task_id, 1)
    publish(store, claimed, 2, 1)
    assert following.take(3) == [0, 1, 2]


def test_a_lost_message_is_found_after_a_silence(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    """The last message has no next one that would show the gap."""
    reads = num_log_reads(redis_client)
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=0.05))
    wait_until_live(redis_client, claimed.task_id, reads)
    append_unheard(redis_client, claimed.task_id, 0)
    assert following.take(1) == [0]
    append_unheard(redis_client, claimed.task_id, 1)
    publish(store, claimed, 2, 1)
    assert following.take(2) == [1, 2]


def test_duplicate_messages_are_dropped(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    reads = num_log_reads(redis_client)
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS))
    wait_until_live(redis_client, claimed.task_id, reads)
    publish(store, claimed, 0, 2)
    for seq, entry in enumerate(tokens(0, 2)):
        redis_client.publish(keys.channel(claimed.task_id), encode(entry.to_event(claimed.task_id, seq)))
    settle(store, claimed, 2)
    assert [event.seq for event in following.rest()] == [0, 1, 2]


def test_an_event_of_a_newer_version_is_skipped(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    """In the log and on the channel."""
    publish(store, claimed, 0, 1)
    redis_client.xadd(keys.log(claimed.task_id), {"w": "sunny"}, id="0-2")
    reads = num_log_reads(redis_client)
    following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS))
    wait_until_live(redis_client, claimed.task_id, reads)
    assert following.take(1) == [0]
    redis_client.xadd(keys.log(claimed.task_id), {"w": "sunny"}, id="0-3")
    newer = {"v": 1, "id": claimed.task_id, "seq": 2, "weather": "sunny"}
    redis_client.publish(keys.channel(claimed.task_id), json.dumps(newer))
    publish(store, claimed, 3, 1)
    assert following.take(1) == [3]


def test_a_slow_reader_gets_every_event(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    """redis-py#1261: Redis disconnects a subscriber that falls behind and drops its messages."""
    cut_before = redis_client.info("stats")["client_output_buffer_limit_disconnections"]
    with setting(redis_client, "client-output-buffer-limit", "pubsub 65536 32768 1"):
        following = Following(follow(redis_url, claimed.task_id, silence_seconds=NEVER_SECONDS), ahead=1)
        wait_until(lambda: num_subscribers(redis_client, claimed.task_id) == 1)
        count = 0
        while redis_client.info("stats")["client_output_buffer_limit_disconnections"] == cut_before:
            assert count < 200_000
            publish(store, claimed, count, 2000)
            count += 2000
        settle(store, claimed, count)
        assert [event.seq for event in following.rest()] == list(range(count + 1))


def test_many_readers_follow_one_task(
    store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    """They join at different events and times, and some are disconnected."""
    followings: list[tuple[int, Following]] = []
    for first in range(0, 200, 20):
        follow = (by_iterator, by_asyncio)[first // 20 % 2]
        after = first // 2 - 1
        followings.append((after, Following(follow(redis_url, claimed.task_id, after))))
        publish(store, claimed, first, 20)
        if first % 60 == 0:
            redis_client.client_kill_filter(_type="pubsub")
    settle(store, claimed, 200)
    whole = store.read_log(claimed.task_id)
    for after, following in followings:
        assert following.rest() == whole[after + 1 :]


def test_a_refused_connection_at_the_start_is_an_error(follow: Follow) -> None:
    """A mistyped address must be reported."""
    error = Following(follow(f"redis://127.0.0.1:{free_port()}/0", "0" * 32)).error()
    assert isinstance(error, redis.ConnectionError)


def test_a_server_that_does_not_answer_at_the_start_is_the_same_error(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a stopped server accepts connections, and a `redis.TimeoutError` was raised."""
    monkeypatch.setattr("tokenmill.client.streams.SOCKET_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with pytest.raises(redis.ConnectionError):
            next(follow(url, "task"))


def test_the_address_of_a_client_is_used(
    store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    """But not its other options: this client decodes replies and has a short timeout."""
    settle(store, claimed, 0, 2)
    with redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=0.001) as client:
        assert [event.seq for event in Following(by_iterator(client, claimed.task_id)).rest()] == [0, 1, 2]
    other = redis.asyncio.Redis.from_url(redis_url, decode_responses=True)
    assert [event.seq for event in Following(by_asyncio(other, claimed.task_id)).rest()] == [0, 1, 2]


def test_an_abandoned_stream_leaves_no_connection(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 1)
    before = len(redis_client.client_list())
    events = follow(redis_url, claimed.task_id)
    assert next(events).seq == 0
    assert len(redis_client.client_list()) > before
    events.close()
    wait_until(lambda: len(redis_client.client_list()) == before)


def test_a_stream_continues_when_another_worker_takes_over(
    follow: Follow, store: TaskStore, redis_client: RedisClient, redis_url: str
) -> None:
    """The reader misses no event when the worker dies."""
    submit(store, redis_client)
    first = claim_one(store, lease_seconds=-1)
    publish(store, first, 0, 2)
    following = Following(follow(redis_url, first.task_id))
    assert following.take(2) == [0, 1]
    store.reap("tiny", max_task_seconds=3600)
    second = claim_one(store)
    publish(store, first, 2, 1)
    store.publish([final_write(second, 2, 1)])
    assert [event.seq for event in following.rest()] == [2, 3]


@contextmanager
def socket_server(directory: Path) -> Iterator[tuple[str, Child]]:
    """An embedded server, as `tokenmill serve` starts it, on existing data."""
    directory.mkdir(exist_ok=True)
    socket_file = embedded_redis.socket_path(directory)
    log, url = directory / "log", embedded_redis.socket_url(socket_file)
    child = Child(embedded_redis.server_spec(directory, log, socket_file), (), lambda _name, _text: None)
    try:
        embedded_redis.wait_until_ready(url, log, lambda: child.returncode is None, lambda _: None)
        yield url, child
    finally:
        child.kill()


def test_a_stream_continues_after_a_restart_of_the_embedded_server(
    follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server listens on the same socket again; the reader logs one warning."""
    with socket_server(tmp_path / "redis") as (url, _), redis.Redis.from_url(url) as client:
        store = TaskStore(client)
        submit(store, client)
        claimed = claim_one(store)
        publish(store, claimed, 0, 3)
        following = Following(follow(url, claimed.task_id))
        assert following.take(3) == [0, 1, 2]
    wait_until(lambda: bool(caplog.records))

    with socket_server(tmp_path / "redis") as (again, _), redis.Redis.from_url(again) as client:
        assert again == url
        settle(TaskStore(client), claimed, 3, 2)
        assert [event.seq for event in following.rest()] == [3, 4, 5]

    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert f"task {claimed.task_id}: waiting for Redis to continue after event 2: " in warning.getMessage()


@pytest.mark.parametrize(
    ("follow", "library"), [(by_iterator, redis.Redis), (by_asyncio, redis.asyncio.Redis)]
)
def test_a_client_of_a_unix_socket_is_a_source(follow: Follow, library: Any, tmp_path: Path) -> None:
    with socket_server(tmp_path / "redis") as (url, _), redis.Redis.from_url(url) as client:
        store = TaskStore(client)
        submit(store, client)
        claimed = claim_one(store)
        settle(store, claimed, 0, 2)
        events = follow(library.from_url(url), claimed.task_id)
        assert [event.seq for event in events] == [0, 1, 2]
