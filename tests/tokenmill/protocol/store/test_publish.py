"""The writes of an owner are stored once, in order, and published; writes of others are refused."""

import dataclasses

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    HARD_TEXTS,
    SLUG,
    claim,
    claim_one,
    dump,
    final_write,
    publish,
    settle,
    snapshot_of,
    submit,
    tokens,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import LogEntry, TokenEvent, encode
from tokenmill.protocol.records import Accepted, Claimed, Gap, Lost, Write
from tokenmill.protocol.store.task_store import TaskStore


def taken_over(store: TaskStore, lapsed: Claimed) -> Claimed:
    """The same task, claimed by another worker. The lease of `lapsed` must have lapsed."""
    assert store.reap(SLUG, max_task_seconds=3600).returned == (lapsed.task_id,)
    return claim_one(store)


def test_the_log_and_the_channel_agree(store: TaskStore, redis_client: RedisClient, claimed: Claimed) -> None:
    entries = [LogEntry.of_token(seq, text) for seq, text in enumerate(HARD_TEXTS)]
    entries.append(LogEntry.of_token(7, "other output", index=1))
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.channel(claimed.task_id))
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        write = Write(task_id=claimed.task_id, owner=claimed.owner, entries=tuple(entries))
        assert store.publish([write]) == [Accepted()]
        messages = [pubsub.get_message(timeout=60)["data"] for _ in entries]
    assert messages == [
        encode(entry.to_event(claimed.task_id, seq)).encode() for seq, entry in enumerate(entries)
    ]
    assert store.read_log(claimed.task_id) == [
        TokenEvent(id=claimed.task_id, seq=seq, token=int(entry.token), text=text, index=int(entry.index))
        for seq, (entry, text) in enumerate(zip(entries, [*HARD_TEXTS, "other output"], strict=True))
    ]
    ids = [row[0] for row in redis_client.xrange(keys.log(claimed.task_id))]
    assert ids == [f"0-{seq + 1}".encode() for seq in range(len(entries))]


def test_an_overlapping_write_adds_only_what_is_missing(store: TaskStore, claimed: Claimed) -> None:
    """The reply was lost, and the next call sends the same and more."""
    publish(store, claimed, 0, 3)
    assert publish(store, claimed, 1, 4) == Accepted()
    assert [event.text for event in store.read_log(claimed.task_id)] == [" t0", " t1", " t2", " t3", " t4"]


def test_a_repeated_write_stores_nothing(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 3, cached_tokens="2")
    assert unchanged(redis_client, lambda: publish(store, claimed, 0, 3, cached_tokens="2")) == Accepted()


def test_a_gap_is_refused_with_the_length_of_the_log(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    """A failover may lose the end of a log; its owner sends it again."""
    publish(store, claimed, 0, 2)
    refused = unchanged(redis_client, lambda: publish(store, claimed, 3, 1, waiting_for="behind"))
    assert refused == Gap(2)
    assert publish(store, claimed, 2, 2) == Accepted()
    assert len(store.read_log(claimed.task_id)) == 4


def test_many_tasks_are_written_in_one_call(store: TaskStore, redis_client: RedisClient) -> None:
    for _ in range(64):
        submit(store, redis_client)
    claimed = claim(store)
    lost = dataclasses.replace(claimed[10], owner="another")
    writes = [
        Write(task_id=one.task_id, owner=one.owner, entries=tokens(0, 1), facts={"scheduled": "1"})
        for one in (*claimed[:10], lost, *claimed[11:])
    ]
    calls_before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    outcomes = store.publish(writes)
    calls = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - calls_before
    # The first call of a script loads it.
    assert calls <= 2
    assert outcomes == [Lost() if one is lost else Accepted() for one in (*claimed[:10], lost, *claimed[11:])]
    assert [len(store.read_log(one.task_id)) for one in claimed] == [int(n != 10) for n in range(64)]


def test_several_writes_of_one_task_are_applied_in_order(store: TaskStore, claimed: Claimed) -> None:
    writes = [
        Write(task_id=claimed.task_id, owner=claimed.owner, first_seq=0, entries=tokens(0, 2)),
        Write(task_id=claimed.task_id, owner=claimed.owner, first_seq=2, entries=tokens(2, 1)),
        final_write(claimed, 3, 1),
    ]
    assert store.publish(writes) == [Accepted()] * 3
    assert [event.seq for event in store.read_log(claimed.task_id)] == [0, 1, 2, 3, 4]
    assert store.publish(writes) == [Accepted()] * 3
    assert len(store.read_log(claimed.task_id)) == 5


def test_no_write_is_no_call(store: TaskStore) -> None:
    assert store.publish([]) == []


@pytest.mark.parametrize("what", ["token", "fact", "result"])
def test_a_former_owner_cannot_write(store: TaskStore, redis_client: RedisClient, what: str) -> None:
    """bullmq#3183, celery#5935: a worker that was away for longer than its lease keeps writing."""
    submit(store, redis_client)
    old = claim_one(store, lease_seconds=-1)
    publish(store, old, 0, 2)
    new = taken_over(store, old)
    calls = {
        "token": lambda: publish(store, old, 2, 1),
        "fact": lambda: publish(store, old, 0, 0, waiting_for="behind"),
        "result": lambda: settle(store, old, 2),
    }
    assert unchanged(redis_client, calls[what]) == Lost()
    assert settle(store, new, 2, 1) == Accepted()
    assert unchanged(redis_client, calls[what]) == Lost()


def test_a_lapsed_owner_writes_until_the_task_is_claimed_again(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """The owner decides, not the clock."""
    submit(store, redis_client)
    lapsed = claim_one(store, lease_seconds=-1)
    assert publish(store, lapsed, 0, 2) == Accepted()
    assert settle(store, lapsed, 2) == Accepted()


def test_a_worker_that_never_owned_the_task_cannot_write(store: TaskStore, redis_client: RedisClient) -> None:
    stranger = Claimed(
        task_id="unknown", owner="me", attempt=1, queue="q", priority=2, accepted_at=0.0, data=b""
    )
    assert unchanged(redis_client, lambda: settle(store, stranger)) == Lost()


@pytest.mark.parametrize(("ago", "is_accepted"), [("0.000001", False), ("1000", True)])
def test_the_start_is_sent_as_seconds_ago_and_is_not_before_the_acceptance(
    store: TaskStore, redis_client: RedisClient, ago: str, is_accepted: bool
) -> None:
    submit(store, redis_client)
    claimed = claim_one(store)
    publish(store, claimed, 0, 1, scheduled=ago)

    snapshot = snapshot_of(store, claimed.task_id)

    assert snapshot.scheduled_at is not None
    assert snapshot.first_token_at is not None
    assert snapshot.accepted_at <= snapshot.scheduled_at < snapshot.first_token_at
    assert (snapshot.scheduled_at == snapshot.accepted_at) is is_accepted


def test_times_are_stored_once(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    first = claim_one(store, lease_seconds=-1)
    publish(store, first, 0, 1, scheduled="0")
    snapshot = snapshot_of(store, first.task_id)
    assert snapshot.status == "in_progress"
    assert snapshot.scheduled_at is not None
    assert snapshot.first_token_at is not None
    assert snapshot.accepted_at <= snapshot.scheduled_at == snapshot.first_token_at <= snapshot.now
    second = taken_over(store, first)
    publish(store, second, 1, 1, scheduled="0")
    again = store.inspect(first.task_id)
    assert again is not None
    assert (again.scheduled_at, again.first_token_at) == (snapshot.scheduled_at, snapshot.first_token_at)
    assert again.attempt == 2


def test_facts_are_set_and_cleared(store: TaskStore, claimed: Claimed) -> None:
    publish(store, claimed, 0, 0, waiting_for="kv_blocks", position="3", tokens_ahead="50", prompt_tokens="9")
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert (snapshot.waiting_for, snapshot.position, snapshot.tokens_ahead) == ("kv_blocks", 3, 50)
    assert (snapshot.status, snapshot.claimed, snapshot.prompt_tokens) == ("queued", True, 9)
    publish(store, claimed, 0, 0, scheduled="1", cached_tokens="4")
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert (snapshot.waiting_for, snapshot.position, snapshot.tokens_ahead) == (None, None, None)
    assert (snapshot.status, snapshot.cached_tokens) == ("in_progress", 4)
    publish(store, claimed, 0, 0, waiting_for="seq_budget")
    publish(store, claimed, 0, 0, waiting_for="")
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert snapshot.waiting_for is None


def test_unknown_facts_are_refused() -> None:
    """A fact named `owner` would take over the task."""
    with pytest.raises(ValueError, match="owner"):
        Write(task_id="t", owner="o", facts={"owner": "me"})


def test_a_lone_surrogate_does_not_prevent_a_write(store: TaskStore, redis_client: RedisClient) -> None:
    """It has no UTF-8 form, so the client would fail at each attempt."""
    for _ in range(2):
        submit(store, redis_client)
    writes = [
        Write(task_id=one.task_id, owner=one.owner, entries=(LogEntry.of_token(1, text),))
        for one, text in zip(claim(store), ("a\ud800", "b"), strict=True)
    ]
    assert store.publish(writes) == [Accepted()] * 2
    assert [store.read_log(write.task_id)[0].text for write in writes] == ["a?", "b"]


def test_the_separator_is_refused(store: TaskStore, redis_client: RedisClient, claimed: Claimed) -> None:
    before = dump(redis_client)
    with pytest.raises(ValueError, match="control character"):
        publish(store, claimed, 0, 1, waiting_for="a\x1fb")
    with pytest.raises(ValueError, match="control character"):
        store.publish([Write(task_id=claimed.task_id, owner=claimed.owner, entries=(LogEntry("1", "\x1f"),))])
    assert dump(redis_client) == before
    # In the text of a token it is escaped.
    write = Write(task_id=claimed.task_id, owner=claimed.owner, entries=(LogEntry.of_token(1, "\x1f"),))
    assert store.publish([write]) == [Accepted()]
    assert store.read_log(claimed.task_id)[0].text == "\x1f"
