"""A call that a stopped Redis runs after its caller has timed out changes nothing."""

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import RedisServer, free_port, start_redis
from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import SLUG, claim, claim_one, dump, owned, reap, submit
from tokenmill.protocol import keys
from tokenmill.protocol.claim_order import DEFAULT_ORDER
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.store import scripting, server_clock
from tokenmill.protocol.store.outbox import Outbox
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.server_clock import ServerClock
from tokenmill.protocol.store.task_store import TaskStore

TIMEOUT_SECONDS = 0.2


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop."""
    server = start_redis(tmp_path, free_port())
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.process.kill()
    server.process.wait()


def impatient(server: RedisServer) -> RedisClient:
    return redis.Redis.from_url(
        server.url, socket_timeout=TIMEOUT_SECONDS, retry=Retry(NoBackoff(), 0), health_check_interval=0
    )


def num_calls(client: RedisClient) -> int:
    stats = client.info("commandstats")
    return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)


CALLS: dict[str, Callable[[TaskStore, Any], object]] = {
    "reap": lambda store, _: reap(store),
    "claim": lambda store, _: claim(store),
    "hand_back": lambda store, held: store.hand_back(owned([held])),
    "renew": lambda store, held: store.renew(owned([held]), 600),
    "cancel": lambda store, held: store.cancel(held.task_id),
    "put_worker": lambda store, _: store.put_worker(
        WorkerRecord(name="w", model="m", slug=SLUG, state="ready", started_at=0.0), 60
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_a_stopped_server_runs_later_changes_nothing(own_server: RedisServer, name: str) -> None:
    """Regression: after a stop a reap requeued tasks of live workers, and a claim reached no worker."""
    patient = redis.Redis.from_url(own_server.url)
    store = TaskStore(impatient(own_server))
    submit(store, patient)
    submit(store, patient)
    held = claim_one(store)
    # The scripts and the clock are loaded; the lease lapses while the server is stopped.
    CALLS[name](TaskStore(patient), held)
    reap(store)
    if name in ("hand_back", "claim", "cancel"):
        submit(store, patient)
        held = claim_one(store, 60)
    patient.zadd(keys.LEASES, {held.task_id: 1})
    before, calls = dump(patient), num_calls(patient)
    own_server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(redis.TimeoutError):
        CALLS[name](store, held)
    own_server.process.send_signal(signal.SIGCONT)
    patient.ping()
    while num_calls(patient) == calls:
        assert patient.ping()
    assert dump(patient) == before


class Late:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_every_script_refuses_a_late_call(redis_client: RedisClient) -> None:
    before = dump(redis_client)
    for name in scripting.NAMES:
        script = redis_client.register_script(scripting.source(name))
        assert script(args=("1000:1",)) == b"TOOLATE"
        with pytest.raises(redis.ResponseError, match="TOOLATE"):
            script(args=("1000:1!",))
    assert dump(redis_client) == before


class ClockWasSet:
    """Redis's clock is set forward by an hour after the first TIME."""

    def __init__(self, client: RedisClient) -> None:
        self._time = client.time
        self.num_calls = 0

    def __call__(self) -> tuple[int, int]:
        seconds, microseconds = self._time()
        self.num_calls += 1
        return (seconds - 3600 if self.num_calls == 1 else seconds), microseconds


@pytest.fixture
def clock_was_set(redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch) -> ClockWasSet:
    clock = ClockWasSet(redis_client)
    monkeypatch.setattr(redis_client, "time", clock)
    return clock


def test_setting_the_clock_forward_costs_one_repetition(
    redis_url: str, redis_client: RedisClient, clock_was_set: ClockWasSet
) -> None:
    submit(TaskStore(redis.Redis.from_url(redis_url)), redis_client)
    assert len(claim(TaskStore(redis_client))) == 1
    assert clock_was_set.num_calls == 2


def test_no_lease_lapses_when_the_clock_was_set(
    redis_url: str, redis_client: RedisClient, clock_was_set: ClockWasSet
) -> None:
    """All would lapse at once: the caller waits as after an outage."""
    store = TaskStore(redis.Redis.from_url(redis_url))
    submit(store, redis_client)
    claim_one(store, lease_seconds=-1)
    with pytest.raises(redis.RedisError, match="TOOLATE"):
        reap(TaskStore(redis_client))
    assert clock_was_set.num_calls == 1
    assert redis_client.zcard(keys.LEASES) == 1


def test_the_estimate_is_never_ahead_and_is_renewed(redis_client: RedisClient) -> None:
    late = Late()
    clock = ServerClock(redis_client, late)
    first = clock.timeout_at()
    seconds, microseconds = redis_client.time()
    assert first is not None
    assert first <= seconds * 10**6 + microseconds + 5 * 10**6, "the library's timeout is 5 s"
    late.now += server_clock.MAX_ESTIMATE_AGE_SECONDS + 1
    again = clock.timeout_at()
    assert again is not None
    assert again - first < server_clock.MAX_ESTIMATE_AGE_SECONDS * 1e6, "by TIME, not by the local clock"


def test_a_client_without_a_timeout_sends_no_time(redis_client: RedisClient) -> None:
    class Patient:
        connection_pool = redis.ConnectionPool(socket_timeout=None)

        def time(self) -> Any:
            raise AssertionError("not needed")

    assert ServerClock(Patient()).timeout_at() is None


def test_the_outbox_and_the_readers_send_the_time_too(
    redis_client: RedisClient, clock_was_set: ClockWasSet
) -> None:
    Outbox(redis_client).take(1, silence_seconds=1)
    assert clock_was_set.num_calls == 2, "the first call was refused as too late"
    Readers(redis_client).read("t", "r", 1)
    assert clock_was_set.num_calls == 3


def test_a_lost_reply_of_a_claim_is_not_a_crash(redis_server: RedisServer, redis_client: RedisClient) -> None:
    """Regression: lost replies made the task a suspect."""
    store = TaskStore(redis_client)
    submit(store, redis_client)
    for _ in range(12):
        script = scripting.source("tasks/claim")
        arguments = ["1000", SLUG, "w", "-1", "480", "100", DEFAULT_ORDER.to_text(), "owner"]
        call = ["EVAL", script, "0", *arguments]
        packed = f"*{len(call)}\r\n".encode() + b"".join(
            b"$%d\r\n%s\r\n" % (len(part.encode()), part.encode()) for part in call
        )
        calls = num_calls(redis_client)
        with socket.create_connection(("127.0.0.1", redis_server.port)) as connection:
            connection.sendall(packed)
        while num_calls(redis_client) == calls:
            pass
        assert len(reap(store).returned) == 1
    assert not claim_one(store).suspect
