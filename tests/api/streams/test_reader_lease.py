"""Disconnects: which tasks they cancel and which continue."""

import threading
from typing import Any, cast

import pytest
import redis

from api.app import ApiApp
from api.shutdown import Shutdown
from api.streams.reader_lease import RENEW_SECONDS, ReaderLease, client_disconnected
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, MakeApp, Submit
from tokenmill.protocol import keys
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def status(client: ApiClient, task_id: str) -> Any:
    return client.get(f"/v1/tasks/{task_id}").json["status"]


@pytest.fixture
def watched(submit: Submit) -> Any:
    """A task that ends with its last reader."""
    return submit(on_disconnect="cancel")


def stream(client: ApiClient, task_id: str) -> Any:
    reply = client.get(f"/v1/tasks/{task_id}/events", buffered=False)
    chunks = reply.iter_encoded()
    assert next(chunks) == b"retry: 1000\n\n"
    return reply, chunks


def lease_ends(client: redis.Redis, task_id: str) -> dict[Any, float]:
    """The end of the lease of each reader."""
    return dict(cast(Any, client.zrange(keys.readers(task_id), 0, -1, withscores=True)))


def inspected(store: TaskStore, task_id: str) -> TaskSnapshot:
    task = store.inspect(task_id)
    assert task is not None
    return task


class TestStreams:
    def test_a_disconnect_cancels_the_task(self, client: ApiClient, watched: str) -> None:
        reply, _ = stream(client, watched)
        reply.close()
        assert status(client, watched) == "cancelled"

    def test_a_cancelled_task_keeps_its_output(
        self, client: ApiClient, watched: str, worker: HandWorker
    ) -> None:
        worker.claim()
        worker.start(watched)
        worker.say(watched, "a", "b")
        reply, chunks = stream(client, watched)
        next(chunks)
        reply.close()
        task = client.get(f"/v1/tasks/{watched}").json
        assert (task["status"], task["outputs"][0]["text"]) == ("cancelled", "ab")
        assert task["outputs"][0]["finish_reason"] == "cancelled"

    @pytest.mark.parametrize("on_disconnect", [None, "continue"])
    def test_other_tasks_continue(self, client: ApiClient, submit: Submit, on_disconnect: Any) -> None:
        task_id = submit(on_disconnect=on_disconnect)
        reply, _ = stream(client, task_id)
        reply.close()
        assert status(client, task_id) == "queued"

    def test_only_the_last_reader_counts(self, client: ApiClient, watched: str) -> None:
        first, second = stream(client, watched), stream(client, watched)
        first[0].close()
        assert status(client, watched) == "queued"
        second[0].close()
        assert status(client, watched) == "cancelled"

    def test_readers_of_another_server_count(
        self, client: ApiClient, watched: str, settings: ApiSettings, make_app: MakeApp
    ) -> None:
        there, here = stream(client_of(make_app(settings)), watched), stream(client, watched)
        here[0].close()
        assert status(client, watched) == "queued"
        there[0].close()
        assert status(client, watched) == "cancelled"

    def test_a_disconnect_before_the_first_byte(self, client: ApiClient, watched: str) -> None:
        """The stream is then never iterated."""
        overrides = {"waitress.client_disconnected": lambda: True}
        client.get(f"/v1/tasks/{watched}/events", buffered=False, environ_overrides=overrides).close()
        assert status(client, watched) == "cancelled"

    def test_a_stream_read_to_its_end_changes_nothing(
        self, client: ApiClient, watched: str, worker: HandWorker, redis_client: redis.Redis
    ) -> None:
        reply, chunks = stream(client, watched)
        worker.run("a")
        assert b"event: finished" in b"".join(chunks)
        reply.close()
        assert status(client, watched) == "completed"
        assert not redis_client.exists(keys.readers(watched), keys.WATCHED)

    def test_a_stopping_server_cancels_no_task(
        self, watched: str, app: ApiApp, client: ApiClient, redis_client: redis.Redis
    ) -> None:
        """The client reconnects to another server, or its lease expires."""
        reply, chunks = stream(client, watched)
        app.parts.shutdown.requested = True
        assert list(chunks) == [b": the server is stopping; reconnect to resume\n\n"]
        reply.close()
        assert status(client, watched) == "queued"
        assert redis_client.exists(keys.readers(watched))

    def test_a_stopping_server_renews_the_leases(
        self, watched: str, app: ApiApp, client: ApiClient, redis_client: redis.Redis
    ) -> None:
        """The clients have a whole lease to reconnect, not the rest of one."""
        reply, chunks = stream(client, watched)
        before = lease_ends(redis_client, watched)
        app.parts.shutdown.requested = True
        assert len(list(chunks)) == 1
        reply.close()
        after = lease_ends(redis_client, watched)
        assert after.keys() == before.keys()
        assert all(after[reader] > before[reader] for reader in before)

    def test_a_refused_stream_is_not_a_reader(
        self, watched: str, redis_url: str, make_app: MakeApp, settings: ApiSettings
    ) -> None:
        small = client_of(make_app(settings.__class__(redis_url=redis_url, max_streams=1)))
        reply, _ = stream(small, watched)
        assert small.get(f"/v1/tasks/{watched}/events").status_code == 503
        assert status(small, watched) == "queued"
        reply.close()
        assert status(small, watched) == "cancelled"


class TestWaits:
    def test_a_wait_that_times_out_cancels_nothing(
        self, client: ApiClient, watched: str, redis_client: redis.Redis
    ) -> None:
        """Polling never cancels."""
        assert client.get(f"/v1/tasks/{watched}?wait=0.05").json["status"] == "queued"
        assert client.get(f"/v1/tasks/{watched}").json["status"] == "queued"
        assert not redis_client.exists(keys.readers(watched), keys.WATCHED)

    def test_a_submission_whose_wait_times_out_cancels_nothing(self, client: ApiClient) -> None:
        body = {"prompt": "x", "on_disconnect": "cancel"}
        reply = client.post("/v1/tasks", json=body, headers={"Prefer": "wait=1"})
        assert (reply.status_code, reply.json["status"]) == (202, "queued")
        assert status(client, reply.json["id"]) == "queued"

    def test_a_wait_that_ends_does_not_affect_streams(self, client: ApiClient, watched: str) -> None:
        reply, _ = stream(client, watched)
        client.get(f"/v1/tasks/{watched}?wait=0.05")
        assert status(client, watched) == "queued"
        reply.close()
        assert status(client, watched) == "cancelled"


class FlakyReaders(Readers):
    """Readers whose Redis can be made unavailable."""

    is_down = False

    def read(self, task_id: str, reader: Any, seconds: float) -> None:
        self._check()
        super().read(task_id, reader, seconds)

    def leave(self, task_id: str, reader: Any, *, gone: bool) -> Any:
        self._check()
        return super().leave(task_id, reader, gone=gone)

    def _check(self) -> None:
        if self.is_down:
            raise redis.ConnectionError("down")


class TestReaderLease:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def readers(self, redis_client: redis.Redis) -> FlakyReaders:
        return FlakyReaders(redis_client)

    @pytest.fixture
    def lease(self, store: TaskStore, watched: str, readers: FlakyReaders, clock: Clock) -> ReaderLease:
        return ReaderLease(readers, inspected(store, watched), {}, Shutdown(), clock)

    def test_it_is_renewed_while_the_client_is_connected(
        self, lease: ReaderLease, watched: str, redis_client: redis.Redis, clock: Clock
    ) -> None:
        with lease:
            redis_client.delete(keys.readers(watched))
            clock.now = RENEW_SECONDS - 0.1
            assert not lease.is_over()
            assert not redis_client.exists(keys.readers(watched))
            clock.now = RENEW_SECONDS
            assert not lease.is_over()
            assert redis_client.exists(keys.readers(watched))
        assert not redis_client.exists(keys.readers(watched))

    def test_a_short_outage_of_redis_does_not_end_it(
        self, lease: ReaderLease, readers: FlakyReaders, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        with lease:
            readers.is_down = True
            clock.now = RENEW_SECONDS
            assert not lease.is_over()
            readers.is_down = False
            assert not lease.is_over()
        assert "will retry" in caplog.text

    def test_a_disconnect_during_an_outage_is_left_to_the_reaper(
        self,
        lease: ReaderLease,
        readers: FlakyReaders,
        store: TaskStore,
        watched: str,
        redis_client: redis.Redis,
        settings: ApiSettings,
    ) -> None:
        with lease:
            lease.disconnected = True
            readers.is_down = True
        assert inspected(store, watched).status == "queued"
        redis_client.delete(keys.readers(watched))
        redis_client.zadd(keys.WATCHED, {watched: 1})
        assert store.reap(settings.slug, max_task_seconds=60).cancelled == (watched,)

    def test_redis_is_not_called_for_other_tasks(
        self, readers: FlakyReaders, store: TaskStore, submit: Submit
    ) -> None:
        readers.is_down = True
        with ReaderLease(readers, inspected(store, submit()), {}, Shutdown()) as lease:
            assert not lease.is_over()


class TestClientDisconnected:
    @pytest.mark.parametrize("gone", [False, True])
    def test_the_server_is_asked(self, gone: bool) -> None:
        assert client_disconnected({"waitress.client_disconnected": lambda: gone}) is gone

    def test_a_server_that_cannot_tell_counts_as_connected(self) -> None:
        assert not client_disconnected({})


@pytest.mark.parametrize("value", ["Cancel", "", True, 5, "stop", {}])
def test_an_unknown_value_is_refused(client: ApiClient, value: Any) -> None:
    reply = client.post("/v1/tasks", json={"prompt": "x", "on_disconnect": value})
    assert (reply.status_code, reply.json["error"]["param"]) == (400, "on_disconnect")


def test_many_concurrent_disconnects_cancel_once(
    client: ApiClient, watched: str, worker: HandWorker, store: TaskStore, app: ApiApp
) -> None:
    worker.claim()
    streams = [stream(client_of(app), watched) for _ in range(8)]
    threads = [threading.Thread(target=reply.close) for reply, _ in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert status(client, watched) == "cancelled"
    assert len(store.read_log(watched)) == 1
