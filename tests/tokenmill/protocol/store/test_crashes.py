"""Which crashes of workers count against a task. A crash: a lease lapsed and was reaped."""

from pathlib import Path

import pytest
import redis

from tests.conftest import free_port, start_redis
from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    fetch,
    owned,
    publish,
    reap,
    settle,
    submit,
    unchanged,
    waiting,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.records import Accepted, Claimed, Lost, Reaped, TaskPhase
from tokenmill.protocol.store.script_errors import POISON_ERROR
from tokenmill.protocol.store.task_store import TaskStore

MANY = 50


def die(store: TaskStore, claimed: Claimed, phase: TaskPhase) -> Reaped:
    """The worker records the phase and crashes."""
    store.renew(owned([claimed]), -1, {claimed.task_id: phase})
    return reap(store)


def fall_under_suspicion(store: TaskStore) -> Claimed:
    """A new claim of the only waiting task, after a crash in its first step."""
    die(store, claim_one(store), "seated")
    suspect = claim_one(store)
    assert suspect.suspect
    return suspect


def blame(store: TaskStore) -> Reaped:
    """Three crashes while the only waiting task, a suspect, ran isolated."""
    for _ in range(3):
        reaped = die(store, claim_one(store), "alone")
    return reaped


def test_a_new_task_is_not_a_suspect(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)

    assert not claim_one(store).suspect


def test_a_crash_after_the_confirmation_counts(store: TaskStore, redis_client: RedisClient) -> None:
    """A prompt that crashes its worker in its first step, or while tokenized, leaves no time to record."""
    submit(store, redis_client)
    store.renew(owned([claim_one(store)]), -1)
    reap(store)
    again = claim_one(store)
    snapshot = store.inspect(again.task_id)

    assert again.suspect
    assert snapshot is not None
    assert (snapshot.waiting_for, snapshot.position) == ("suspect", 0)


def test_a_claim_without_confirmation_never_counts(store: TaskStore, redis_client: RedisClient) -> None:
    """The reply of a claim may be lost; then no worker ever had the task."""
    submit(store, redis_client)
    for _ in range(MANY):
        assert not claim_one(store, lease_seconds=-1).suspect
        assert len(reap(store).returned) == 1


def test_a_crash_after_a_token_does_not_count(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    for attempt in range(MANY):
        claimed = claim_one(store)
        assert not claimed.suspect
        assert publish(store, claimed, attempt, 1) == Accepted()
        die(store, claimed, "seated")


def test_tokens_of_earlier_attempts_are_not_progress(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    first = claim_one(store)
    publish(store, first, 0, 3)
    die(store, first, "seated")

    assert len(fall_under_suspicion(store).entries) == 3


def test_a_waiting_task_is_a_suspect_after_three_crashes_in_a_row(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """It may have been scheduled just before each crash."""
    submit(store, redis_client)
    seen = []
    for _ in range(4):
        claimed = claim_one(store)
        seen.append(claimed.suspect)
        die(store, claimed, "waiting")

    assert seen == [False, False, False, True]


def test_an_untouched_suspect_is_never_blamed(store: TaskStore, redis_client: RedisClient) -> None:
    """hindsight#2675: a task that merely ran beside the one that crashes must not pay for it."""
    submit(store, redis_client)
    suspect = fall_under_suspicion(store)
    for _ in range(MANY):
        assert die(store, suspect, "untouched").returned == (suspect.task_id,)
        suspect = claim_one(store)
        assert suspect.suspect
    assert len(redis_client.hget(keys.run(suspect.task_id), "crashes") or b"") < 200, "it does not grow"
    publish(store, suspect, 0, 1)
    die(store, suspect, "alone")

    assert not claim_one(store).suspect


def test_a_suspect_is_not_blamed_before_its_isolated_run_is_recorded(
    store: TaskStore, redis_client: RedisClient
) -> None:
    submit(store, redis_client)
    fall_under_suspicion(store)
    for _ in range(MANY):
        redis_client.zadd(keys.LEASES, dict.fromkeys(redis_client.zrange(keys.LEASES, 0, -1), 1))
        assert reap(store).poisoned == ()
        suspect = claim_one(store)
    assert len(redis_client.hget(keys.run(suspect.task_id), "crashes")) < 200, "it does not grow"


def test_three_crashes_of_isolated_runs_end_the_task_as_poisoned(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """goose#35: a request that crashed its process was retried for ever."""
    task_id = submit(store, redis_client)
    first = claim_one(store)
    publish(store, first, 0, 2)
    die(store, first, "seated")
    suspect = fall_under_suspicion(store)
    assert die(store, suspect, "alone") == Reaped(returned=(task_id,))
    assert die(store, claim_one(store), "alone") == Reaped(returned=(task_id,))
    assert die(store, claim_one(store), "alone") == Reaped(poisoned=(task_id,))

    events = store.read_log(task_id)
    assert [event.seq for event in events] == [0, 1, 2]
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert (end.finish_reason, end.done, end.error) == ("error", True, POISON_ERROR.to_json())
    assert end.usage is not None
    assert end.usage["completion_tokens"] == 2, "published tokens count"
    job = fetch(redis_client, task_id)
    assert job.get_status() == "failed"
    (result,) = job.results()
    assert result.exc_string == POISON_ERROR.message
    assert waiting(redis_client, first.queue) == []
    assert claim(store) == []
    assert not redis_client.exists(keys.LEASES)
    assert redis_client.pttl(keys.run(task_id)) > 0
    assert store.queue_stats(first.queue.split(":")[1]).totals["finished:error"] == 1
    assert reap(store) == Reaped()


def test_every_output_of_a_poisoned_task_ends(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client, num_outputs=3)
    fall_under_suspicion(store)
    store.hand_back(owned([_held(store, redis_client, task_id)]))
    blame(store)

    ends = [event for event in store.read_log(task_id) if isinstance(event, FinishedEvent)]
    assert [(end.index, end.done) for end in ends] == [(0, False), (1, False), (2, True)]


def _held(store: TaskStore, client: RedisClient, task_id: str) -> Claimed:
    owner = client.hget(keys.run(task_id), "owner").decode()
    return Claimed(task_id=task_id, owner=owner, attempt=0, queue="", priority=2, accepted_at=0, data=b"")


def test_progress_voids_all_crashes(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    suspect = fall_under_suspicion(store)
    die(store, suspect, "alone")
    die(store, claim_one(store), "alone")
    third = claim_one(store)
    publish(store, third, 0, 1)
    assert die(store, third, "alone").returned == (third.task_id,), "it died after its token"
    fourth = claim_one(store)
    assert not fourth.suspect
    assert die(store, fourth, "seated").poisoned == ()

    assert blame(store).poisoned == (fourth.task_id,), "three more are needed"


def test_an_untouched_task_is_never_a_suspect(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    for _ in range(MANY):
        claimed = claim_one(store)
        assert not claimed.suspect
        die(store, claimed, "untouched")


@pytest.mark.parametrize("phase", ["untouched", "waiting", "seated", "alone"])
def test_hand_backs_never_count(store: TaskStore, redis_client: RedisClient, phase: TaskPhase) -> None:
    submit(store, redis_client)
    for _ in range(MANY):
        claimed = claim_one(store)
        assert not claimed.suspect
        store.renew(owned([claimed]), 60, {claimed.task_id: phase})
        assert store.hand_back(owned([claimed])) == 1


def test_a_hand_back_of_a_crashed_worker_counts(store: TaskStore, redis_client: RedisClient) -> None:
    """A kernel of one request may cost device after device, while each worker shuts down in order."""
    ids = [submit(store, redis_client) for _ in range(3)]
    guilty, progressed, mate = claim(store)
    publish(store, progressed, 0, 1)
    store.renew(owned([guilty, mate]), 60, {mate.task_id: "waiting"})
    assert store.hand_back(owned([guilty, progressed, mate]), crashed=True) == 3
    num_returned = []
    for _ in range(3):
        claimed = claim(store)
        assert [one.suspect for one in claimed] == [True, False, False]
        phases: dict[str, TaskPhase] = dict.fromkeys(ids, "untouched")
        store.renew(owned(claimed), 60, phases | {ids[0]: "alone"})
        num_returned.append(store.hand_back(owned(claimed), crashed=True))

    assert num_returned == [3, 3, 2]
    snapshot = store.inspect(ids[0])
    assert snapshot is not None
    assert snapshot.status == "failed"
    assert [one.suspect for one in claim(store)] == [False, False], "the others were untouched"


@pytest.mark.parametrize("how", ["renew", "publish"])
def test_an_owner_that_renews_after_its_lease_lapsed_did_not_crash(
    store: TaskStore, redis_client: RedisClient, how: str
) -> None:
    """celery#5935: a worker that was stopped or disconnected for longer than its lease is still alive."""
    submit(store, redis_client)
    stopped = claim_one(store)
    die(store, stopped, "seated")
    _call_again(store, stopped, how)

    assert not claim_one(store).suspect


@pytest.mark.parametrize("how", ["renew", "publish"])
def test_a_crash_of_an_isolated_run_is_retracted_if_its_owner_renews(
    store: TaskStore, redis_client: RedisClient, how: str
) -> None:
    submit(store, redis_client)
    stopped = fall_under_suspicion(store)
    for _ in range(MANY):
        assert die(store, stopped, "alone").poisoned == ()
        again = claim_one(store)
        _call_again(store, stopped, how)
        store.hand_back(owned([again]))
        stopped = claim_one(store)
        assert stopped.suspect, "crashes of other owners still count"


def _call_again(store: TaskStore, claimed: Claimed, how: str) -> None:
    if how == "renew":
        assert store.renew(owned([claimed]), 60).lost == {claimed.task_id}
    else:
        assert publish(store, claimed, len(claimed.entries), 1) == Lost()


def test_a_task_that_has_ended_does_not_change(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    suspect = fall_under_suspicion(store)
    die(store, suspect, "alone")
    die(store, claim_one(store), "alone")
    last = claim_one(store)
    assert die(store, last, "alone").poisoned == (task_id,)

    assert unchanged(redis_client, lambda: store.renew(owned([last]), 60)).lost == {task_id}
    assert unchanged(redis_client, lambda: publish(store, last, 0, 1)) == Lost()
    assert unchanged(redis_client, lambda: settle(store, last)) == Lost()
    assert unchanged(redis_client, lambda: store.hand_back(owned([last]), crashed=True)) == 0


def test_a_claim_of_an_older_version_never_counts(store: TaskStore, redis_client: RedisClient) -> None:
    """In a rolling upgrade: older scripts stored neither length nor phase."""
    submit(store, redis_client)
    claimed = claim_one(store, lease_seconds=-1)
    redis_client.hdel(keys.run(claimed.task_id), "claimed_length", "standing")
    reap(store)

    assert not claim_one(store).suspect


@pytest.mark.parametrize("how", ["hand_back", "reap"])
def test_the_record_of_an_attempt_is_removed_with_it(
    store: TaskStore, redis_client: RedisClient, how: str
) -> None:
    """A later claim by an older version stores none, and a record that is left would count against it."""
    submit(store, redis_client)
    claimed = claim_one(store)
    if how == "reap":
        die(store, claimed, "seated")
    else:
        store.hand_back(owned([claimed]))

    assert redis_client.hmget(keys.run(claimed.task_id), "claimed_length", "standing") == [None, None]


def test_a_log_that_lost_its_end_is_not_progress(store: TaskStore, redis_client: RedisClient) -> None:
    """After a crash of Redis's host the log may be shorter than at the claim."""
    submit(store, redis_client)
    first = claim_one(store)
    publish(store, first, 0, 3)
    die(store, first, "seated")
    second = claim_one(store)
    redis_client.xtrim(keys.log(second.task_id), maxlen=0, approximate=False)
    die(store, second, "seated")

    assert claim_one(store).suspect


def test_a_lapse_during_an_outage_of_redis_is_not_a_crash(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """The worker may have shut down in order without being able to hand back."""
    submit(store, redis_client)
    for _ in range(MANY):
        held = claim_one(store)
        assert not held.suspect
        store.renew(owned([held]), -1)
        # A call failed after that renewal; that process waits, and another requeues the task.
        outage = store.reap(SLUG, max_task_seconds=3600, reclaim_leases=False, failed_seconds_ago=0.0)
        assert outage.returned == ()
        assert reap(store).returned == (held.task_id,)


def test_a_lapse_across_a_restart_of_redis_is_not_a_crash(tmp_path: Path) -> None:
    port = free_port()
    server = start_redis(tmp_path, port)
    client = redis.Redis.from_url(server.url)
    submit(TaskStore(client), client)
    held = claim_one(TaskStore(client))
    TaskStore(client).renew(owned([held]), 0.001)
    # The start time of a server has a resolution of one second.
    renewed_at = client.time()[0]
    while client.time()[0] < renewed_at + 3:
        pass
    server.process.terminate()
    server.process.wait()
    server = start_redis(tmp_path, port)
    try:
        assert reap(TaskStore(client)).returned == (held.task_id,)
        assert not claim_one(TaskStore(client)).suspect
    finally:
        server.process.kill()
        server.process.wait()


def test_an_earlier_failure_of_another_caller_does_not_shorten_an_outage(
    store: TaskStore, redis_client: RedisClient
) -> None:
    submit(store, redis_client)
    held = claim_one(store)
    store.renew(owned([held]), -1)
    for seconds_ago in (0.0, 600.0):
        store.reap(SLUG, max_task_seconds=3600, reclaim_leases=False, failed_seconds_ago=seconds_ago)
    assert reap(store).returned == (held.task_id,)
    assert not claim_one(store).suspect


def test_a_crash_after_an_outage_counts(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    held = claim_one(store)
    store.reap(SLUG, max_task_seconds=3600, reclaim_leases=False, failed_seconds_ago=1.0)
    die(store, held, "seated")
    assert claim_one(store).suspect
