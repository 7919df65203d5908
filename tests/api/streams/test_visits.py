"""Clients that go away: whose tasks end with them, and whose go on."""

import threading

import pytest

from api.redis_clients import connect
from api.streams.presence import Shutdown
from api.streams.visits import RENEW_SECONDS, Visit
from tokenmill.protocol import keys
from tokenmill.protocol.store.readers import Readers


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def status(client, task_id):
    return client.get(f"/v1/tasks/{task_id}").json["status"]


@pytest.fixture
def watched(submit):
    """A task that ends with its last reader."""
    return submit(on_disconnect="cancel")


def stream(client, task_id):
    reply = client.get(f"/v1/tasks/{task_id}/events", buffered=False)
    chunks = reply.iter_encoded()
    assert next(chunks) == b"retry: 1000\n\n"
    return reply, chunks


class TestStreams:
    def test_a_client_that_goes_away_ends_its_task(self, client, watched):
        reply, _ = stream(client, watched)
        reply.close()
        assert status(client, watched) == "cancelled"

    def test_a_running_one_keeps_what_there_is(self, client, watched, worker):
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
    def test_others_go_on(self, client, submit, on_disconnect):
        task_id = submit(on_disconnect=on_disconnect)
        reply, _ = stream(client, task_id)
        reply.close()
        assert status(client, task_id) == "queued"

    def test_it_is_the_last_that_counts(self, client, watched):
        first, second = stream(client, watched), stream(client, watched)
        first[0].close()
        assert status(client, watched) == "queued"
        second[0].close()
        assert status(client, watched) == "cancelled"

    def test_readers_of_another_server_count(self, client, watched, settings, make_app):
        there, here = stream(make_app(settings).test_client(), watched), stream(client, watched)
        here[0].close()
        assert status(client, watched) == "queued"
        there[0].close()
        assert status(client, watched) == "cancelled"

    def test_a_client_that_is_gone_before_the_first_byte(self, client, watched):
        """Then nothing of the stream is ever asked for."""
        overrides = {"waitress.client_disconnected": lambda: True}
        client.get(f"/v1/tasks/{watched}/events", buffered=False, environ_overrides=overrides).close()
        assert status(client, watched) == "cancelled"

    def test_one_that_was_read_to_its_end_changes_nothing(self, client, watched, worker, redis_client):
        reply, chunks = stream(client, watched)
        worker.run("a")
        assert b"event: finished" in b"".join(chunks)
        reply.close()
        assert status(client, watched) == "completed"
        assert not redis_client.exists(keys.readers(watched), keys.WATCHED)

    def test_a_server_that_stops_ends_no_task(self, watched, app, client, redis_client):
        """Its client comes back, to another server; if not, it lapses."""
        reply, chunks = stream(client, watched)
        app.extensions["shutdown"].requested = True
        assert list(chunks) == [b": the server stops; reconnect to go on\n\n"]
        reply.close()
        assert status(client, watched) == "queued"
        assert redis_client.exists(keys.readers(watched))

    def test_its_clients_have_all_the_time_to_come_back(self, watched, app, client, redis_client):
        """Not what was left since their reader was noted last."""
        reply, chunks = stream(client, watched)
        (before,) = redis_client.zrange(keys.readers(watched), 0, -1, withscores=True)
        app.extensions["shutdown"].requested = True
        assert len(list(chunks)) == 1
        reply.close()
        (after,) = redis_client.zrange(keys.readers(watched), 0, -1, withscores=True)
        assert after[0] == before[0]
        assert after[1] > before[1]

    def test_a_refused_stream_is_no_reader(self, watched, redis_url, make_app, settings):
        small = make_app(settings.__class__(redis_url=redis_url, max_streams=1)).test_client()
        reply, _ = stream(small, watched)
        assert small.get(f"/v1/tasks/{watched}/events").status_code == 503
        assert status(small, watched) == "queued"
        reply.close()
        assert status(small, watched) == "cancelled"


class TestWaits:
    def test_a_wait_that_is_over_ends_nothing(self, client, watched, redis_client):
        """What polls is not cancelled."""
        assert client.get(f"/v1/tasks/{watched}?wait=0.05").json["status"] == "queued"
        assert client.get(f"/v1/tasks/{watched}").json["status"] == "queued"
        assert not redis_client.exists(keys.readers(watched), keys.WATCHED)

    def test_a_submission_that_waited_its_time_ends_nothing(self, client):
        body = {"prompt": "x", "on_disconnect": "cancel"}
        reply = client.post("/v1/tasks", json=body, headers={"Prefer": "wait=1"})
        assert (reply.status_code, reply.json["status"]) == (202, "queued")
        assert status(client, reply.json["id"]) == "queued"

    def test_a_wait_that_ends_leaves_streams_alone(self, client, watched):
        reply, _ = stream(client, watched)
        client.get(f"/v1/tasks/{watched}?wait=0.05")
        assert status(client, watched) == "queued"
        reply.close()
        assert status(client, watched) == "cancelled"


class TestVisit:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def visit(self, store, watched, redis_client, clock):
        return Visit(Readers(redis_client), store.inspect(watched), {}, Shutdown(), clock)

    def test_it_says_that_it_is_there_while_it_is(self, visit, watched, redis_client, clock):
        with visit:
            redis_client.delete(keys.readers(watched))
            clock.now = RENEW_SECONDS - 0.1
            assert not visit.is_over()
            assert not redis_client.exists(keys.readers(watched))
            clock.now = RENEW_SECONDS
            assert not visit.is_over()
            assert redis_client.exists(keys.readers(watched))
        assert not redis_client.exists(keys.readers(watched))

    def test_redis_being_away_for_a_moment_ends_nothing(self, store, watched, redis_url, clock, caplog):
        caplog.set_level("DEBUG")
        readers = Readers(connect(redis_url))
        visit = Visit(readers, store.inspect(watched), {}, Shutdown(), clock)
        with visit:
            visit._readers = Readers(connect("redis://127.0.0.1:1/0"))
            clock.now = RENEW_SECONDS
            assert not visit.is_over()
            visit._readers = readers
            assert not visit.is_over()
        assert "trying again" in caplog.text

    def test_who_left_while_redis_was_away_lapses(self, store, watched, redis_client, clock, settings):
        """Nobody waits for Redis; the reaper does it."""
        visit = Visit(Readers(redis_client), store.inspect(watched), {}, Shutdown(), clock)
        with visit:
            visit.gone = True
            visit._readers = Readers(connect("redis://127.0.0.1:1/0"))
        assert store.inspect(watched).status == "queued"
        redis_client.delete(keys.readers(watched))
        redis_client.zadd(keys.WATCHED, {watched: 1})
        assert store.reap(settings.slug, max_task_seconds=60).cancelled == (watched,)

    def test_for_other_tasks_redis_is_not_asked(self, store, submit):
        task = store.inspect(submit())
        with Visit(Readers(connect("redis://127.0.0.1:1/0")), task, {}, Shutdown()) as visit:
            assert not visit.is_over()


@pytest.mark.parametrize("value", ["Cancel", "", True, 5, "stop", {}])
def test_another_word_is_refused(client, value):
    reply = client.post("/v1/tasks", json={"prompt": "x", "on_disconnect": value})
    assert (reply.status_code, reply.json["error"]["param"]) == (400, "on_disconnect")


def test_many_that_go_away_at_once_end_it_once(client, watched, worker, store, app):
    worker.claim()
    streams = [stream(app.test_client(), watched) for _ in range(8)]
    threads = [threading.Thread(target=reply.close) for reply, _ in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert status(client, watched) == "cancelled"
    assert len(store.read_log(watched)) == 1
