"""Several outputs of one task: each index ends once, and the last end is the task's, whichever script writes
it.
"""

from collections import Counter

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    final_write,
    log_of,
    reap,
    snapshot_of,
    submit,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.limits import TimeLimits
from tokenmill.protocol.messages import Event, FinishedEvent, LogEntry, TaskError, TokenEvent, Usage, encode
from tokenmill.protocol.records import Accepted, Claimed, Write
from tokenmill.protocol.store.task_store import TaskStore

ERROR = TaskError(type="server_error", code="engine_error", message="a row was not finite")


def write(store: TaskStore, claimed: Claimed, first: int, *entries: LogEntry) -> None:
    one = Write(task_id=claimed.task_id, owner=claimed.owner, first_seq=first, entries=entries)
    assert store.publish([one]) == [Accepted()]


def begun(store: TaskStore, claimed: Claimed) -> None:
    """Two tokens of output 0, one of output 2, and output 1 has ended."""
    write(
        store,
        claimed,
        0,
        LogEntry.of_token(5, "a"),
        LogEntry.of_token(6, "b", index=2),
        LogEntry.of_end("", "stop", index=1, done=False),
        LogEntry.of_token(7, "c"),
    )


def assert_each_ended_once(events: list[Event], num_outputs: int) -> None:
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    assert Counter(end.index for end in ends) == Counter(range(num_outputs))
    assert [end.done for end in ends] == [False] * (num_outputs - 1) + [True]
    assert isinstance(events[-1], FinishedEvent)
    assert [event.seq for event in events] == list(range(len(events)))
    for index in range(num_outputs):
        assert isinstance([event for event in events if event.index == index][-1], FinishedEvent)


@pytest.mark.parametrize("state", ["waiting", "claimed", "running", "handed back", "lapsed"])
def test_a_cancellation_ends_every_output_once(
    store: TaskStore, redis_client: RedisClient, state: str
) -> None:
    """vllm#10852: a client that waits for each of its n outputs hangs if one has no end."""
    task_id = submit(store, redis_client, num_outputs=3)
    if state != "waiting":
        claimed = claim_one(store, lease_seconds=-1)
        assert claimed.num_outputs == 3
        if state != "claimed":
            begun(store, claimed)
        if state == "handed back":
            store.hand_back({task_id: claimed.owner})
        if state == "lapsed":
            assert reap(store).returned == (task_id,)

    assert store.cancel(task_id) == "cancelled"

    events = store.read_log(task_id)
    assert_each_ended_once(events, 3)
    tokens = sum(isinstance(event, TokenEvent) for event in events)
    assert events[-1].usage == Usage(prompt_tokens=0, completion_tokens=tokens).to_json()  # type: ignore[union-attr]
    assert unchanged(redis_client, lambda: store.cancel(task_id)) == "cancelled"
    assert snapshot_of(store, task_id).status == "cancelled"


def test_the_channel_and_the_log_agree_after_a_cancellation(
    store: TaskStore, redis_client: RedisClient
) -> None:
    task_id = submit(store, redis_client, num_outputs=3)
    begun(store, claim_one(store))
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.channel(task_id))
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        store.cancel(task_id)
        messages = [pubsub.get_message(timeout=60)["data"] for _ in range(2)]

    ends = [
        LogEntry.of_end("", "cancelled", index=0, done=False),
        LogEntry.of_end("", "cancelled", index=2, usage=Usage(prompt_tokens=0, completion_tokens=3)),
    ]
    assert messages == [encode(end.to_event(task_id, 4 + n)).encode() for n, end in enumerate(ends)]
    assert list(log_of(store, task_id)[4:]) == ends


def test_a_timeout_in_the_queue_ends_every_output(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client, num_outputs=2, limits=TimeLimits(timeout_seconds=0))
    assert reap(store).timed_out == (task_id,)

    events = store.read_log(task_id)
    assert_each_ended_once(events, 2)
    assert {event.finish_reason for event in events if isinstance(event, FinishedEvent)} == {"timeout"}
    assert all(event.error for event in events if isinstance(event, FinishedEvent))


@pytest.mark.parametrize("how", ["claim", "renew", "hand_back", "settle", "reap"])
def test_an_end_by_rqs_tools_ends_every_output(store: TaskStore, redis_client: RedisClient, how: str) -> None:
    task_id = submit(store, redis_client, num_outputs=3)
    owner = "" if how in ("claim", "reap") else claim_one(store).owner
    redis_client.delete(f"rq:job:{task_id}")
    if how == "claim":
        assert claim(store) == []
    elif how == "reap":
        redis_client.delete(f"rq:queue:{redis_client.hget(keys.run(task_id), 'queue').decode()}")
        assert reap(store).cancelled == (task_id,)
    elif how == "renew":
        assert store.renew({task_id: owner}, 60).cancelled == {task_id}
    elif how == "hand_back":
        store.hand_back({task_id: owner})
    else:
        claimed = Claimed(
            task_id=task_id, owner=owner, attempt=1, queue="", priority=2, accepted_at=0.0, data=b""
        )
        store.publish([final_write(claimed)])

    assert_each_ended_once(store.read_log(task_id), 3)
    assert store.queue_stats(SLUG).totals["finished:cancelled"] == 1


def test_the_end_of_a_failed_output_has_its_error(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client, num_outputs=2)
    claimed = claim_one(store)
    write(store, claimed, 0, LogEntry.of_end("", "error", index=1, done=False, error=ERROR))

    (end,) = store.read_log(claimed.task_id)
    assert isinstance(end, FinishedEvent)
    assert (end.done, end.error, end.usage) == (False, ERROR.to_json(), None)


def test_tokens_keep_their_logprobs(store: TaskStore, redis_client: RedisClient) -> None:
    """The channel and the log have the same bytes."""
    submit(store, redis_client, num_outputs=2)
    claimed = claim_one(store)
    logprobs = {"logprob": -9999.0, "token": '\u2028"', "bytes": [226, 128, 168, 34], "top": []}
    entries = [LogEntry.of_token(7, "x", index, {"logprobs": logprobs}) for index in (0, 1)]
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.channel(claimed.task_id))
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        write(store, claimed, 0, *entries)
        messages = [pubsub.get_message(timeout=60)["data"] for _ in entries]

    assert messages == [
        encode(entry.to_event(claimed.task_id, seq)).encode() for seq, entry in enumerate(entries)
    ]
    assert list(log_of(store, claimed.task_id)) == entries
    assert [event.logprobs for event in store.read_log(claimed.task_id)] == [logprobs] * 2  # type: ignore[union-attr]
    store.cancel(claimed.task_id)
    last = store.read_log(claimed.task_id)[-1]
    assert isinstance(last, FinishedEvent)
    assert last.usage is not None
    assert last.usage["completion_tokens"] == 2, "a token with members is a token"
